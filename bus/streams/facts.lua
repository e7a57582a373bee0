-- Length, newest entry and readers of streams at one instant.
-- KEYS streams   Returns {server time, {length, newest id, {readers, consumers, pending, lag or -1, oldest pending...}...,
-- ever appended or -1}...}. `lag` and `entries-added` are fields of Redis 7, and `lag` is null when it cannot be told: -1 here.
local all = {}
for n, key in ipairs(KEYS) do
  local row = {0, '', {}, 0}
  if redis.call('EXISTS', key) == 1 then
    local info, s = redis.call('XINFO', 'STREAM', key), {}
    for i = 1, #info, 2 do s[info[i]] = info[i + 1] end
    row[1], row[4] = s['length'], s['entries-added'] or -1
    if s['last-entry'] then row[2] = s['last-entry'][1] end
    for g, info in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      local f = {}
      for i = 1, #info, 2 do f[info[i]] = info[i + 1] end
      local lag = -1
      if type(f['lag']) == 'number' then lag = f['lag'] end
      local oldest = redis.call('XPENDING', key, f['name'], '-', '+', 1)[1] or {}
      row[3][g] = {f['name'], f['consumers'], f['pending'], lag, oldest}
    end
  end
  all[n] = row
end
return {redis.call('TIME'), all}
