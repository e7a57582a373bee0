-- Entries with one of some notes, of each note the newest ones of a page: a look at a long log must not move all of it.
-- KEYS 1 stream   ARGV from, entries in a page, {note, most}...   Returns {id of the last entry looked at or false, {entry...}},
-- newest first.
local found, room = {}, {}
for i = 3, #ARGV, 2 do room[ARGV[i]] = tonumber(ARGV[i + 1]) end
local page = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
for n = #page, 1, -1 do
  local all = page[n][2]
  for f = 1, #all, 2 do
    if all[f] == 'note' then
      local left = room[all[f + 1]] or 0
      if left > 0 then
        found[#found + 1] = page[n]
        room[all[f + 1]] = left - 1
      end
      break
    end
  end
end
return {#page > 0 and page[#page][1], found}
