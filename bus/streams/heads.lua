-- Entries without their bodies, which are cut off here: a look at a full stream must not move its gigabytes.
-- KEYS 1 stream   ARGV command (XRANGE | XREVRANGE), from, to, count   Returns {id, body bytes, {field, value, ...}}...
local found = {}
for n, entry in ipairs(redis.call(ARGV[1], KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])) do
  local fields, size, all = {}, 0, entry[2]
  for f = 1, #all, 2 do
    if all[f] == 'body' then size = #all[f + 1] else fields[#fields + 1] = all[f]; fields[#fields + 1] = all[f + 1] end
  end
  found[n] = {entry[1], size, fields}
end
return found
