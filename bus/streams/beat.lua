-- Replace an actor's last vitals, note when they came by this server's clock (no two hosts' clocks are compared), and renew its name.
-- KEYS 1 vitals   2 heard   3 names   4 state      ARGV actor, message, then of one that has its name (else all ''): token, who,
--      milliseconds of silence after which others may take it, the run's life ('' = not looked at), '1' to give it back
-- Returns {generation} (a new one where it had lapsed, or the server had lost it: nobody took it) | {0, word} another took it,
--         nothing is written | {-1} the server holds another life | {} without a name
local call, name, token = redis.call, ARGV[1], ARGV[3]
local time, reply = call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if token ~= '' then
  local word, generation = call('HGET', KEYS[3], name), nil
  if word then
    local had = nil
    generation, had = string.match(word, '^(%d+):(%x*):')
    if had ~= token and (had ~= '' or ARGV[7] == '') then return {0, word} end -- or given back by this very call
  elseif ARGV[6] ~= '' and call('HGET', KEYS[4], 'life') ~= ARGV[6] then
    return {-1}
  end
  if not generation or now - (tonumber(call('HGET', KEYS[2], name)) or now) > tonumber(ARGV[5]) then
    generation = call('HINCRBY', KEYS[3], '#', 1)
    call('HSET', KEYS[3], name, generation .. ':' .. token .. ':' .. ARGV[4])
  end
  if ARGV[7] == '1' then call('HSET', KEYS[3], name, generation .. '::') end
  reply = {tonumber(generation)}
end
call('HSET', KEYS[1], name, ARGV[2])
call('HSET', KEYS[2], name, now)
return reply
