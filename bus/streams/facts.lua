-- Length, newest entry and readers of streams at one instant.
-- KEYS streams   Returns {server time, {length, newest id, {readers, consumers, pending, lag or -1, oldest pending...}...}...}
-- `lag` is a field of Redis 7 and is null when it cannot be told; both are -1 here.
local all = {}
for n, key in ipairs(KEYS) do
  local row = {redis.call('XLEN', key), '', {}}
  if redis.call('EXISTS', key) == 1 then
    local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    if newest then row[2] = newest[1] end
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
