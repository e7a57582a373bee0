-- Delete what every consumer group has acknowledged: entries below the oldest pending or undelivered id of any group.
-- KEYS 1 stream   2 bytes      Returns {number of entries removed, blob references of the removed...}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {0} end
local low = nil
local function less(x, y)
  local xm, xs = string.match(x, '(%d+)-(%d+)')
  local ym, ys = string.match(y, '(%d+)-(%d+)')
  if tonumber(xm) ~= tonumber(ym) then return tonumber(xm) < tonumber(ym) end
  return tonumber(xs) < tonumber(ys)
end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for f = 1, #info, 2 do group[info[f]] = info[f + 1] end
  local bound
  if group['pending'] > 0 then
    bound = redis.call('XPENDING', KEYS[1], group['name'])[2]
  else
    local ms, seq = string.match(group['last-delivered-id'], '(%d+)-(%d+)')
    bound = ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)
  end
  if low == nil or less(bound, low) then low = bound end
end
if low == nil then return {0} end
-- What leaves is taken off the bytes in flight, or producers would wait for room for ever.
local reply, bytes, from = {0}, 0, '-'
while true do
  local page = redis.call('XRANGE', KEYS[1], from, '(' .. low, 'COUNT', 100)
  for _, entry in ipairs(page) do
    local fields = entry[2]
    for f = 1, #fields, 2 do
      if fields[f] == 'body' then
        bytes = bytes + #fields[f + 1]
      elseif fields[f] == 'blob' then
        bytes = bytes + tonumber(string.match(fields[f + 1], ':(%d+)$') or 0)
        reply[#reply + 1] = fields[f + 1]
      end
    end
  end
  if #page < 100 then break end
  from = '(' .. page[#page][1]
end
reply[1] = redis.call('XTRIM', KEYS[1], 'MINID', low)
if bytes > 0 then redis.call('HINCRBY', KEYS[2], KEYS[1], string.format('-%.0f', bytes)) end
return reply
