-- One hop as one step: check, acknowledge, append, move the accounts. All or nothing.
--
-- KEYS  1 state   2 ledger   3 open   4 bytes   5 marks   6.. streams and other keys, addressed by index
-- ARGV  slot, mark (what this call leaves in the marks of its sender, so that a repetition after a lost reply is known),
--       then a flat list of counted sections, in this order:
--   guard   0 | 1 field expect value
--   acks    n, then n x (stream key, readers, entry id, bytes, shared)      shared = 1: other readers exist, do not delete
--   appends n, then n x (stream key, bytes, bound, blob key or 0, cap, m, m x field/value)
--   ledger  n, then n x (field, delta)
--   opens   n, then n x (group id, value)
--   closes  n, then n x group id
--   deletes n, then n x key index
--   state   n, then n x (field, value)
-- Returns {"ok", entry ids...} | {"done"} (by this very call, whose reply was lost) | {"again"} (the guard says that an
--         equal one was done before) | {"stale", value} (the guard fails)
--       | {"moved", ids...} (no longer pending) | {"full", stream key} | {"noblob", key}
local a, i = ARGV, 1
local function take() local v = a[i]; i = i + 1; return v end
local function key() return KEYS[tonumber(take())] end

local slot, mark = take(), take()
if redis.call('HGET', KEYS[5], slot) == mark then return {'done'} end

local guard = nil
if take() == '1' then guard = {take(), take(), take()} end
if guard then
  local now = redis.call('HGET', KEYS[1], guard[1]) or ''
  if now == guard[3] then return {'again'} end
  if now ~= guard[2] then return {'stale', now} end
end

local acks = {}
for n = 1, tonumber(take()) do acks[n] = {key(), take(), take(), tonumber(take()), take()} end
local outs = {}
for n = 1, tonumber(take()) do
  local out = {key(), tonumber(take()), tonumber(take()), tonumber(take()), tonumber(take())}
  local fields = {}
  for f = 1, tonumber(take()) do fields[f] = take() end
  out[6] = fields
  outs[n] = out
end

-- Checks first: nothing is written before all of them hold.
local moved = {}
for _, ack in ipairs(acks) do
  local held = redis.call('XPENDING', ack[1], ack[2], ack[3], ack[3], 1)
  if #held == 0 then moved[#moved + 1] = ack[3] end
end
if #moved > 0 then table.insert(moved, 1, 'moved'); return moved end
for _, out in ipairs(outs) do
  if out[4] > 0 and redis.call('EXISTS', KEYS[out[4]]) == 0 then return {'noblob', KEYS[out[4]]} end
  if out[3] > 0 then
    local used = tonumber(redis.call('HGET', KEYS[4], out[1]) or '0')
    if used > 0 and used + out[2] > out[3] then return {'full', out[1]} end
  end
end

for _, ack in ipairs(acks) do
  redis.call('XACK', ack[1], ack[2], ack[3])
  if ack[5] == '0' then
    redis.call('XDEL', ack[1], ack[3])
    if ack[4] > 0 then redis.call('HINCRBY', KEYS[4], ack[1], string.format('-%.0f', ack[4])) end
  end
end
local reply = {'ok'}
for _, out in ipairs(outs) do
  local id
  if out[5] > 0 then
    id = redis.call('XADD', out[1], 'MAXLEN', '~', out[5], '*', unpack(out[6]))
  else
    id = redis.call('XADD', out[1], '*', unpack(out[6]))
    redis.call('HINCRBY', KEYS[4], out[1], out[2])
  end
  reply[#reply + 1] = id
end
for _ = 1, tonumber(take()) do redis.call('HINCRBY', KEYS[2], take(), take()) end
for _ = 1, tonumber(take()) do redis.call('HSET', KEYS[3], take(), take()) end
for _ = 1, tonumber(take()) do redis.call('HDEL', KEYS[3], take()) end
for _ = 1, tonumber(take()) do redis.call('DEL', key()) end
for _ = 1, tonumber(take()) do redis.call('HSET', KEYS[1], take(), take()) end
if guard then redis.call('HSET', KEYS[1], guard[1], guard[3]) end
redis.call('HSET', KEYS[5], slot, mark)
redis.call('EXPIRE', KEYS[5], 3600)
return reply
