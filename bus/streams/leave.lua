-- Take what is left of actors that are gone off the bus: their consumers, vitals, and accounts of their own.
-- KEYS 1 vitals   2 ledger   3.. streams      ARGV idle milliseconds, then names of actors that are gone
-- Returns the names that were forgotten. One that holds an entry anywhere is not touched: its entries must be claimed first.
-- A consumer without vitals is nobody's, once it has been idle for so long; one that reads again comes back by itself.
local call = redis.call
local idle_ms, gone, holds, found = tonumber(ARGV[1]), {}, {}, {}
for n = 2, #ARGV do gone[ARGV[n]] = true end
for k = 3, #KEYS do
  if call('EXISTS', KEYS[k]) == 1 then
    for _, raw in ipairs(call('XINFO', 'GROUPS', KEYS[k])) do
      local group = {}
      for f = 1, #raw, 2 do group[raw[f]] = raw[f + 1] end
      for _, fields in ipairs(call('XINFO', 'CONSUMERS', KEYS[k], group['name'])) do
        local one = {}
        for f = 1, #fields, 2 do one[fields[f]] = fields[f + 1] end
        if one['pending'] > 0 then
          holds[one['name']] = true
        elseif one['idle'] >= idle_ms then
          found[#found + 1] = {KEYS[k], group['name'], one['name']}
        end
      end
    end
  end
end
for _, at in ipairs(found) do
  local nobody = not gone[at[3]] and call('HEXISTS', KEYS[1], at[3]) == 0
  if (gone[at[3]] or nobody) and not holds[at[3]] then call('XGROUP', 'DELCONSUMER', at[1], at[2], at[3]) end
end
local forgotten = {}
for n = 2, #ARGV do
  local name = ARGV[n]
  if not holds[name] and call('HDEL', KEYS[1], name) == 1 then
    forgotten[#forgotten + 1] = name
    local account = 'tokens/generated/worker/' .. name
    local tokens = call('HGET', KEYS[2], account)
    if tokens then
      call('HINCRBY', KEYS[2], 'tokens/generated/worker/gone', tokens)
      call('HDEL', KEYS[2], account)
    end
  end
end
return forgotten
