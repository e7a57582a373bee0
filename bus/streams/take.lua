-- Take an actor's name, unless another process has it.
-- KEYS 1 names   2 heard   3 state      ARGV name, token, who, then what the caller knows of a holder that is gone: its word
--      and when it was heard last, each '' = of any; then the run's life, '' = not looked at
-- A word is `generation:token:who`; one that was given back has no token. Field `#` of names: the newest generation.
-- Returns {generation} taken | {0, word, heard, silent milliseconds} another has it | {-1} the server holds another life
local call, name = redis.call, ARGV[1]
if ARGV[6] ~= '' and call('HGET', KEYS[3], 'life') ~= ARGV[6] then return {-1} end
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local word, heard = call('HGET', KEYS[1], name), call('HGET', KEYS[2], name) or ''
if word then
  local generation, token = string.match(word, '^(%d+):(%x*):')
  if token == ARGV[2] then return {tonumber(generation)} end
  local gone = ARGV[4] ~= '' and word == ARGV[4] and (ARGV[5] == '' or heard == ARGV[5])
  if token ~= '' and not gone then return {0, word, heard, math.max(0, now - (tonumber(heard) or 0))} end
end
local generation = call('HINCRBY', KEYS[1], '#', 1)
call('HSET', KEYS[1], name, generation .. ':' .. ARGV[2] .. ':' .. ARGV[3])
call('HSET', KEYS[2], name, now)
return {generation}
