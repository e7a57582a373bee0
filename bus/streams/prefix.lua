-- Save a piece of a running sample's tokens and renew its lease, if the worker still holds it.
-- KEYS 1 stream   2 prefix list   ARGV readers, consumer, entry id, chunk      Returns 1 saved | 0 no longer ours
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[4])
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return 1
