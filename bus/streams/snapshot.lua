-- State, ledger and open groups of a run at one instant. KEYS 1 state 2 ledger 3 open
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
