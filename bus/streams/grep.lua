-- Entries that hold some bytes, or are of some types, without the others: a look at a long log must not move all of it.
-- KEYS 1 stream   ARGV from, count, bytes, type...   Returns {id of the last entry looked at or false, {entry...}}
local found, last = {}, false
local types = {}
for i = 4, #ARGV do types[ARGV[i]] = true end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  last = entry[1]
  local all = entry[2]
  for f = 1, #all, 2 do
    local value = all[f + 1]
    if (all[f] == 'type' and types[value]) or all[f] == 'blob' or string.find(value, ARGV[3], 1, true) then
      found[#found + 1] = entry
      break
    end
  end
end
return {last, found}
