-- Hops: each one checks, acknowledges, appends and moves the accounts, all or nothing. Several of one process share a call.
--
-- KEYS  1 state   2 ledger   3 open   4 bytes   5 marks   6 names   7.. every other key that ARGV names
-- ARGV  lane, mark: what this call leaves in the marks of its sender, so that a repetition after a lost reply is known
--       n; name and token of the sender, '' = it has no name (see take.lua); then n commits, each one msgpack array of arrays and then, as they are, the bodies and values that it leaves out:
--   acks     {stream key, readers, bytes, {entry ids in order}}...
--   appends  {stream key, bytes, bound, blob key or '', cap, {field, value...}}...; the last value is left out if it is a body
--   ledger   field, delta...
--   opens    group ids; their values are left out
--   closes   group ids
--   deletes  keys
--   state    field, value...
--   guard    nothing, or field, expect, value
-- Returns for each commit {"ok", entry ids...} | {"done"} (by this very call, whose reply was lost) | {"again"} (the guard
--         says that an equal one was done before) | {"stale", value} (the guard fails) | {"moved", ids...} (no longer
--         pending) | {"full", stream key} | {"noblob", key} | {"nameless", word} (the sender's name is another's, whose word it
--         is, or nobody's: '')
local KEEP_VERSIONS = 64
local state, ledger, open, bytes, marks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, decode = redis.call, cmsgpack.unpack
local i = 5
local function take() i = i + 1; return ARGV[i] end

-- A zombie does nothing, whatever its commits are.
if ARGV[4] ~= '' then
  local word = call('HGET', KEYS[6], ARGV[4])
  if not word or string.match(word, '^%d+:(%x*):') ~= ARGV[5] then
    local refused = {}
    for n = 1, tonumber(ARGV[3]) do refused[n] = {'nameless', word or ''} end
    return refused
  end
end

-- Bytes in flight of a stream: read once, kept here, written when the call ends.
local used, moves = {}, {}
local function garbage(key, field) error('GARBAGE|' .. key .. '|' .. field .. '|') end
local function add(key, field, delta)
  local now = redis.pcall('HINCRBY', key, field, string.format('%.0f', delta))
  if type(now) ~= 'table' then return end
  if string.find(now.err, 'not an integer') then garbage(key, field) end
  call('HINCRBY', key, field, 0) -- which says the same again, as an error of this call
end
local function in_flight(key)
  if not used[key] then used[key] = tonumber(call('HGET', bytes, key) or '0') or garbage(bytes, key) end
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

-- Acknowledged entries of the whole call, by stream: deleted when it ends.
local gone = {}
local function delete_later(key, ids)
  gone[key] = gone[key] or {}
  for _, id in ipairs(ids) do gone[key][#gone[key] + 1] = id end
end

local function still_pending(key, readers, ids)
  local held = call('XPENDING', key, readers, ids[1], ids[#ids], #ids)
  local all = #held == #ids
  for at = 1, #held do all = all and held[at][1] == ids[at] end
  if all then return nil end
  local moved = nil -- entries of others lie between, or some are gone: ask one by one
  for _, id in ipairs(ids) do
    if #call('XPENDING', key, readers, id, id, 1) == 0 then
      moved = moved or {'moved'}
      moved[#moved + 1] = id
    end
  end
  return moved
end

local function hop(done)
  local acks, outs, sums, opens, closes, deletes, sets, guard = unpack(decode(take()), 1, 8)
  for _, out in ipairs(outs) do
    local fields = out[6]
    if #fields % 2 == 1 then fields[#fields + 1] = take() end
  end
  local values = {}
  for n = 1, #opens do values[n] = take() end
  if done then return {'done'} end

  -- Checks first: nothing is written before all of them hold.
  if guard[1] then
    local now = call('HGET', state, guard[1]) or ''
    if now == guard[3] then return {'again'} end
    if now ~= guard[2] then return {'stale', now} end
  end
  for _, out in ipairs(outs) do
    local key, size, bound, blob = out[1], out[2], out[3], out[4]
    if blob ~= '' and call('EXISTS', blob) == 0 then return {'noblob', blob} end
    if bound > 0 then
      local now = in_flight(key)
      if now > 0 and now + size > bound then return {'full', key} end
    end
  end
  local alone = #acks == 1 and #acks[1][4] == 1 -- a single acknowledgement is its own check, below
  if not alone then
    for _, ack in ipairs(acks) do
      local moved = still_pending(ack[1], ack[2], ack[4])
      if moved then return moved end
    end
  end

  for _, ack in ipairs(acks) do
    local key, ids = ack[1], ack[4]
    if call('XACK', key, ack[2], unpack(ids)) == 0 and alone then return {'moved', ids[1]} end
    delete_later(key, ids)
    move_bytes(key, -ack[3])
  end
  local reply = {'ok'}
  for n, out in ipairs(outs) do
    local key = out[1]
    if out[5] > 0 then
      reply[n + 1] = call('XADD', key, 'MAXLEN', '~', out[5], '*', unpack(out[6]))
    else
      reply[n + 1] = call('XADD', key, '*', unpack(out[6]))
      move_bytes(key, out[2])
    end
  end
  for f = 1, #sums, 2 do move_account(sums[f], sums[f + 1]) end
  for n, group in ipairs(opens) do call('HSET', open, group, values[n]) end
  for _, group in ipairs(closes) do call('HDEL', open, group) end
  for _, key in ipairs(deletes) do call('DEL', key) end
  for f = 1, #sets, 2 do call('HSET', state, sets[f], sets[f + 1]) end
  if guard[1] then call('HSET', state, guard[1], guard[3]) end
  return reply
end

-- A mark is the number of the sender's last call and, for each commit in it, whether it took effect. One that did not has
-- written nothing, so it may simply be tried again. A call older than the mark comes from a connection given up long ago.
local last, effects = string.match(call('HGET', marks, ARGV[1]) or '0:', '^(%d+):(.*)$')
last = tonumber(last) - tonumber(ARGV[2])
local replies, flags, effective = {}, {}, false
for n = 1, tonumber(ARGV[3]) do
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
    add(ledger, head .. 'older', tonumber(n) or garbage(ledger, account))
    call('HDEL', ledger, account)
  end
end
local folded = nil
for _, field in ipairs(fields_of) do
  local head, id = string.match(field, '^(tokens/%l+/version/)(%d+)$')
  if head then
    folded = folded or tonumber(call('HGET', state, 'folded') or '0') or garbage(state, 'folded')
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
  add(ledger, account, sums_of[field])
end
for key, ids in pairs(gone) do
  for from = 1, #ids, 1000 do call('XDEL', key, unpack(ids, from, math.min(from + 999, #ids))) end
end
for key, delta in pairs(moves) do
  if delta ~= 0 then add(bytes, key, delta) end
end
if effective and last <= 0 then
  call('HSET', marks, ARGV[1], ARGV[2] .. ':' .. table.concat(flags))
  call('EXPIRE', marks, 86400) -- each time: the marks of a sender outlive its last call by a day
end
return replies
