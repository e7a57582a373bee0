-- Replace an actor's last vitals, and note when they came by this server's clock: no two hosts' clocks are compared.
-- KEYS 1 vitals   2 heard      ARGV actor, message
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], now[1] * 1000 + math.floor(now[2] / 1000))
