-- Take a dead letter away and, if it was there, append an entry; so that a letter is never both gone and not retried.
-- KEYS 1 dead   2 target   3 bytes      ARGV letter id, bytes to account, n, n x field/value
-- Returns new id | "" (nothing to append) | false (no letter)
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return false end
local n = tonumber(ARGV[3])
if n == 0 then return '' end
local id = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4, 3 + 2 * n))
if tonumber(ARGV[2]) > 0 then redis.call('HINCRBY', KEYS[3], KEYS[2], ARGV[2]) end
return id
