-- Hops: each one checks, acknowledges, appends and moves the accounts, all or nothing. Several of one process share a call.
--
-- KEYS  1 state   2 ledger   3 open   4 bytes   5 marks   6.. every other key that ARGV names
-- ARGV  lane, mark: what this call leaves in the marks of its sender, so that a repetition after a lost reply is known
--       n, then n commits, each a list of counted sections:
--   guard   0 | 1 field expect value
--   acks    n, then n x (stream key, readers, bytes, m, m x entry id in order)
--   appends n, then n x (stream key, bytes, bound, blob key or '', cap, m, m x field/value)
--   more    0 | 1 and the rest:
--   ledger  n, then n x (field, delta)
--   opens   n, then n x (group id, value)
--   closes  n, then n x group id
--   deletes n, then n x key
--   state   n, then n x (field, value)
-- Returns for each commit {"ok", entry ids...} | {"done"} (by this very call, whose reply was lost) | {"again"} (the guard
--         says that an equal one was done before) | {"stale", value} (the guard fails) | {"moved", ids...} (no longer
--         pending) | {"full", stream key} | {"noblob", key}
local a, i = ARGV, 3
local KEEP_VERSIONS = 64
local state, ledger, open, bytes, marks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call = redis.call
local function take() i = i + 1; return a[i] end
local function number() i = i + 1; return tonumber(a[i]) end
-- m values from here on, without copying them one by one.
local function span(m) local from = i + 1; i = i + m; return from, i end

-- Bytes in flight of a stream: read once, kept here, written when the call ends.
local used, moves = {}, {}
local function in_flight(key)
  if not used[key] then used[key] = tonumber(call('HGET', bytes, key) or '0') end
  return used[key]
end
local function move_bytes(key, delta)
  if used[key] then used[key] = used[key] + delta end
  moves[key] = (moves[key] or 0) + delta
end

-- The accounts: many samples of one call move the same ones.
local sums_of, fields_of = {}, {}
local function move_account(field, delta)
  if not sums_of[field] then
    sums_of[field] = 0
    fields_of[#fields_of + 1] = field
  end
  sums_of[field] = sums_of[field] + delta
end

local function still_pending(key, readers, from, to)
  local n = to - from + 1
  local held = call('XPENDING', key, readers, a[from], a[to], n)
  local all = #held == n
  for at = 1, #held do all = all and held[at][1] == a[from + at - 1] end
  if all then return nil end
  local moved = nil -- entries of others lie between, or some are gone: ask one by one
  for at = from, to do
    if #call('XPENDING', key, readers, a[at], a[at], 1) == 0 then
      moved = moved or {'moved'}
      moved[#moved + 1] = a[at]
    end
  end
  return moved
end

local function hop(done)
  local guard = nil
  if take() == '1' then guard = {take(), take(), take()} end
  local n_acks = number()
  local acks = i + 1
  for _ = 1, n_acks do i = i + 3; span(number()) end
  local n_outs = number()
  local outs = i + 1
  for _ = 1, n_outs do i = i + 5; span(number()) end
  local sums, sums_to, opens, opens_to, closes, closes_to, deletes, deletes_to, sets, sets_to
  local more = take() == '1'
  if more then
    sums, sums_to = span(2 * number())
    opens, opens_to = span(2 * number())
    closes, closes_to = span(number())
    deletes, deletes_to = span(number())
    sets, sets_to = span(2 * number())
  end
  if done then return {'done'} end

  -- Checks first: nothing is written before all of them hold.
  if guard then
    local now = call('HGET', state, guard[1]) or ''
    if now == guard[3] then return {'again'} end
    if now ~= guard[2] then return {'stale', now} end
  end
  local at = outs
  for _ = 1, n_outs do -- at: stream key, bytes, bound, blob key, cap, m, fields
    if a[at + 3] ~= '' and call('EXISTS', a[at + 3]) == 0 then return {'noblob', a[at + 3]} end
    if a[at + 2] ~= '0' then
      local now = in_flight(a[at])
      if now > 0 and now + a[at + 1] > tonumber(a[at + 2]) then return {'full', a[at]} end
    end
    at = at + 6 + a[at + 5]
  end
  at = acks
  local alone = n_acks == 1 and a[acks + 3] == '1'
  if not alone then -- a single acknowledgement is its own check, below
    for _ = 1, n_acks do -- at: stream key, readers, bytes, m, ids
      local moved = still_pending(a[at], a[at + 1], at + 4, at + 3 + a[at + 3])
      if moved then return moved end
      at = at + 4 + a[at + 3]
    end
    at = acks
  end

  for _ = 1, n_acks do
    local key, last = a[at], at + 3 + a[at + 3]
    if call('XACK', key, a[at + 1], unpack(a, at + 4, last)) == 0 and alone then return {'moved', a[last]} end
    call('XDEL', key, unpack(a, at + 4, last))
    move_bytes(key, -a[at + 2])
    at = last + 1
  end
  local reply = {'ok'}
  at = outs
  for n = 1, n_outs do
    local key, last = a[at], at + 5 + a[at + 5]
    if a[at + 4] ~= '0' then
      reply[n + 1] = call('XADD', key, 'MAXLEN', '~', a[at + 4], '*', unpack(a, at + 6, last))
    else
      reply[n + 1] = call('XADD', key, '*', unpack(a, at + 6, last))
      move_bytes(key, tonumber(a[at + 1]))
    end
    at = last + 1
  end
  if more then
    for f = sums, sums_to, 2 do move_account(a[f], a[f + 1]) end
    for f = opens, opens_to, 2 do call('HSET', open, a[f], a[f + 1]) end
    for f = closes, closes_to do call('HDEL', open, a[f]) end
    for f = deletes, deletes_to do call('DEL', a[f]) end
    for f = sets, sets_to, 2 do call('HSET', state, a[f], a[f + 1]) end
  end
  if guard then call('HSET', state, guard[1], guard[3]) end
  return reply
end

-- A mark is the number of the sender's last call and, for each commit in it, whether it took effect. One that did not has
-- written nothing, so it may simply be tried again. A call older than the mark comes from a connection given up long ago.
local last, effects = string.match(call('HGET', marks, a[1]) or '0:', '^(%d+):(.*)$')
last = tonumber(last) - tonumber(a[2])
local replies, flags, effective = {}, {}, false
for n = 1, tonumber(a[3]) do
  replies[n] = hop(last > 0 or (last == 0 and string.sub(effects, n, n) == '1'))
  local took = replies[n][1] == 'ok' or replies[n][1] == 'done'
  flags[n] = took and '1' or '0'
  effective = effective or took
end
-- Views by version name the newest KEEP_VERSIONS; older ones are one account of each view. State field "folded": the newest
-- version of those. A token that an old version made and that moves late goes there at once.
local function fold(head, version)
  local account = head .. string.format('%.0f', version)
  local n = call('HGET', ledger, account)
  if n then
    call('HINCRBY', ledger, head .. 'older', n)
    call('HDEL', ledger, account)
  end
end
local folded = nil
for _, field in ipairs(fields_of) do
  local head, id = string.match(field, '^(tokens/%l+/version/)(%d+)$')
  if head then
    folded = folded or tonumber(call('HGET', state, 'folded') or '0')
    id = tonumber(id)
    local limit = id - KEEP_VERSIONS
    if limit > folded then
      if limit - folded > 10 * KEEP_VERSIONS then -- numbers were left out, or this hash is new: look at what is there
        for _, known in ipairs(call('HKEYS', ledger)) do
          local of, version = string.match(known, '^(tokens/%l+/version/)(%d+)$')
          if of and tonumber(version) <= limit then fold(of, tonumber(version)) end
        end
      else
        for version = folded + 1, limit do
          for _, view in ipairs({'generated', 'trained'}) do fold('tokens/' .. view .. '/version/', version) end
        end
      end
      folded = limit
      call('HSET', state, 'folded', string.format('%.0f', folded))
    end
  end
  local account = head and id <= folded and head .. 'older' or field
  call('HINCRBY', ledger, account, string.format('%.0f', sums_of[field]))
end
for key, delta in pairs(moves) do
  if delta ~= 0 then call('HINCRBY', bytes, key, string.format('%.0f', delta)) end
end
if effective and last <= 0 then
  call('HSET', marks, a[1], a[2] .. ':' .. table.concat(flags))
  call('EXPIRE', marks, 86400) -- each time: the marks of a sender outlive its last call by a day
end
return replies
