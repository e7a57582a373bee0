-- Accounts, open groups and the readable fields of every entry on some streams, all at one instant and without bodies.
-- KEYS 1 state   2 ledger   3 open   4.. streams
-- Returns {state field "reissue", ledger pairs, open pairs, rows of each stream...}; a row is entry id, id, group, tokens,
--         note, each "" when absent.
local function rows(key)
  local out, from = {}, '-'
  while true do
    local page = redis.call('XRANGE', key, from, '+', 'COUNT', 100)
    for _, entry in ipairs(page) do
      local named, fields = {}, entry[2]
      for f = 1, #fields, 2 do
        if fields[f] ~= 'body' then named[fields[f]] = fields[f + 1] end
      end
      local n = #out
      out[n + 1], out[n + 2], out[n + 3] = entry[1], named['id'] or '', named['group'] or ''
      out[n + 4], out[n + 5] = named['tokens'] or '', named['note'] or ''
    end
    if #page < 100 then return out end
    from = '(' .. page[#page][1]
  end
end

local reply = {redis.call('HGET', KEYS[1], 'reissue') or '', redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
for k = 4, #KEYS do reply[k] = rows(KEYS[k]) end
return reply
