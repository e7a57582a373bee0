-- Save a piece of a running sample's tokens and renew its lease, if the worker still holds it.
-- KEYS 1 stream   2 prefix list   3 marks (see commit.lua)   4 names   ARGV readers, consumer, entry id, chunk, slot, mark, then
--      name and token of the worker, '' = it has no name (see take.lua)
-- Returns 1 saved, now or by this very call whose reply was lost | 0 no longer ours, also when the name is not
if ARGV[7] ~= '' and string.match(redis.call('HGET', KEYS[4], ARGV[7]) or '', '^%d+:(%x*):') ~= ARGV[8] then return 0 end
if redis.call('HGET', KEYS[3], ARGV[5]) == ARGV[6] then return 1 end
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[4])
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
redis.call('EXPIRE', KEYS[3], 86400)
return 1
