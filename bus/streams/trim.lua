-- Delete what every consumer group has acknowledged: entries below the oldest pending or undelivered id of any group.
-- KEYS 1 stream   Returns the number of entries removed.
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
if low == nil then return 0 end
return redis.call('XTRIM', KEYS[1], 'MINID', low)
