-- The ledger of a store, in the store: who pays for which block, whose go first, and what is still being written.
-- One call is atomic, so all replicas agree. ARGV[1] names the operation; they are at the end.
--
--   KEYS[1] meta        hash         room, total (bytes), tick (a clock of uses, not of time)
--           quota       hash         namespace -> "reserved limit weight"
--           used        hash         namespace -> bytes
--           block       hash         identity -> "bytes holder namespace"; holder "-": kept, else the put that writes it
--           over        sorted set   those of `used` by how far they are over their shares, negated: so the first is the
--                                    furthest over, by name among equals; +inf: it has no kept block
--           use:<name>  sorted set   a namespace's kept blocks by the tick of their last use
--           lease       sorted set   blocks being written, by when that promise ends (ms)
--           expiry      sorted set   kept blocks with a time to live, by its end (ms)
--   KEYS[2] <identity>               the values themselves
--
-- An identity is spelled "kv1:" and 64 hexadecimal digits: above 64 bytes a server does not pack it into lists, in which
-- it would search from the beginning.
-- All keys share one hash tag. Names are made from KEYS, so a cluster runs it where that tag lives.

local KEPT, NOBODY = '-', ''
local MOST_VICTIMS, MOST_DUE, MOST_FORGOTTEN = 1000, 256, 256 -- of one call: nobody else is served meanwhile

local MOST_WORDS = 1000 -- of one command beside its key: Lua cannot unpack 8,000. Even, as some come in pairs

local VALUE = KEYS[2]
local META, QUOTA, USED, BLOCK = KEYS[1] .. 'meta', KEYS[1] .. 'quota', KEYS[1] .. 'used', KEYS[1] .. 'block'
local OVER, USE, LEASE, EXPIRY = KEYS[1] .. 'over', KEYS[1] .. 'use:', KEYS[1] .. 'lease', KEYS[1] .. 'expiry'
local call = redis.call

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local room, total, tick -- of META, written back by `save`
local base -- ticks up to this one are from before this call

-- What a total begins with whose writer kept OVER, too. One from before there was that set writes none: so each of its
-- calls is noticed, while both kinds of engines share the store.
local MARK = '+'

local function int(number) return string.format('%.0f', number) end

local function tell(command, key, words) -- many in one command, which costs more than what it does with one of them
  for first = 1, #words, MOST_WORDS do
    call(command, key, unpack(words, first, math.min(first + MOST_WORDS - 1, #words)))
  end
end

local function push(words, ...)
  for at = 1, select('#', ...) do words[#words + 1] = select(at, ...) end
end

-- Charges. Read once, written once.

local quotas, used = {}, {}
local changed, stale = {}, {} -- namespaces: USED, OVER do not say any more how they are
local has_kept = {} -- namespaces that have a kept block for certain: this call has used it

local function quota_of(namespace)
  if not quotas[namespace] then
    local reserved, limit, weight = string.match(call('HGET', QUOTA, namespace) or '', '^(%S+) (%S+) (%S+)$')
    quotas[namespace] = {
      reserved = tonumber(reserved or 0), limit = tonumber(limit or math.huge), weight = tonumber(weight or 1),
    }
  end
  return quotas[namespace]
end

local function used_of(namespace)
  if not used[namespace] then used[namespace] = tonumber(call('HGET', USED, namespace) or 0) end
  return used[namespace]
end

local function over_share(namespace)
  if namespace == NOBODY and used_of(NOBODY) > 0 then return math.huge end -- what nobody pays for goes first
  local quota = quota_of(namespace)
  return (used_of(namespace) - quota.reserved) / quota.weight
end

local function note(namespace) -- its charge or its kept blocks have changed
  changed[namespace], stale[namespace] = true, true
end

local function charge(namespace, bytes)
  used[namespace] = used_of(namespace) + bytes
  total = total + bytes
  note(namespace)
end

local function place(namespace, kept) -- in OVER
  return kept and string.format('%.17g', -over_share(namespace)) or '+inf'
end

local function rank(namespace, kept)
  if used_of(namespace) <= 0 then
    call('ZREM', OVER, namespace)
  else
    call('ZADD', OVER, place(namespace, kept), namespace)
  end
end

local function rank_all() -- O(namespaces): with new quotas, or when OVER cannot be relied on
  call('DEL', OVER)
  for _, namespace in ipairs(call('HKEYS', USED)) do note(namespace) end
end

local function save()
  local charges, places, gone = {}, {}, {}
  for namespace in pairs(changed) do
    if used_of(namespace) > 0 then
      push(charges, namespace, int(used[namespace]))
      push(places, place(namespace, has_kept[namespace] or call('EXISTS', USE .. namespace) == 1), namespace)
    else
      push(gone, namespace)
    end
  end
  tell('HSET', USED, charges)
  tell('ZADD', OVER, places)
  tell('HDEL', USED, gone)
  tell('ZREM', OVER, gone)
  call('HSET', META, 'total', MARK .. int(total), 'tick', int(tick))
end

-- Blocks.

local function entry(id)
  local bytes, holder, namespace = string.match(call('HGET', BLOCK, id) or '', '^(%d+) (%S+) (.*)$')
  return tonumber(bytes), holder, namespace
end

local function write_entry(id, bytes, holder, namespace)
  call('HSET', BLOCK, id, int(bytes) .. ' ' .. holder .. ' ' .. namespace)
end

local function length(id) -- of the value; 0: there is none
  local found = redis.pcall('STRLEN', VALUE .. id)
  return type(found) == 'number' and found or -1 -- of another type: somebody else's
end

local some_expire = call('EXISTS', EXPIRY) == 1

local function strike(id, bytes, holder, namespace)
  call('HDEL', BLOCK, id)
  if holder == KEPT then
    call('ZREM', USE .. namespace, id)
    has_kept[namespace] = nil
  else
    call('ZREM', LEASE, id)
  end
  if some_expire then call('ZREM', EXPIRY, id) end
  charge(namespace, -bytes)
end

local function drop(id) -- whether there was a value
  local bytes, holder, namespace = entry(id)
  if bytes then strike(id, bytes, holder, namespace) end
  return call('UNLINK', VALUE .. id) > 0
end

local function used_at(id, namespace, at, ttl)
  if call('ZADD', USE .. namespace, 'GT', int(at), id) == 1 then
    note(namespace) -- where the server evicted that set, its owner may be ranked as one without kept blocks
  end
  has_kept[namespace] = true
  if ttl > 0 then
    call('PEXPIREAT', VALUE .. id, int(now + ttl))
    call('ZADD', EXPIRY, int(now + ttl), id)
    some_expire = true
  elseif some_expire then
    call('PERSIST', VALUE .. id)
    call('ZREM', EXPIRY, id)
  end
end

local function drop_what_is_due()
  for _, set in ipairs({ LEASE, EXPIRY }) do
    for _, id in ipairs(call('ZRANGEBYSCORE', set, '-inf', int(now), 'LIMIT', 0, MOST_DUE)) do
      drop(id)
      call('ZREM', set, id)
    end
  end
end

-- Victims.

local evicted, victims, barren = {}, 0, {}

local function oldest(namespace) -- never what this very call has used
  local first = call('ZRANGE', USE .. namespace, 0, 0, 'WITHSCORES')
  return first[1] and tonumber(first[2]) <= base and first[1]
end

local function evict(namespace, reason, id) -- the identity, where it is known already
  id = victims < MOST_VICTIMS and (id or oldest(namespace))
  if not id then return false end
  victims = victims + 1
  local before = used_of(namespace)
  drop(id)
  if used_of(namespace) == before then -- the ledger had lost its entry
    call('ZREM', USE .. namespace, id)
    note(namespace)
  end
  local name = reason .. namespace
  evicted[name] = (evicted[name] or 0) + 1
  return true
end

local function furthest_over() -- and its oldest block; nil: nobody has one beyond its reservation
  while true do
    for namespace in pairs(stale) do rank(namespace, not barren[namespace]) end
    stale = {}
    local namespace = call('ZRANGE', OVER, 0, 0)[1]
    if not namespace or barren[namespace] or over_share(namespace) <= 0 then return end
    local id = oldest(namespace)
    if id then return namespace, id end
    barren[namespace] = true -- for this call: all that it has is being written, or was used just now
    note(namespace)
  end
end

local function make_room(namespace, bytes) -- "q": refused by the own quota, "p": by pressure, nil: there is room
  local limit = quota_of(namespace).limit
  if bytes > room then return 'p' end
  if bytes > limit then return 'q' end
  while used_of(namespace) + bytes > limit do
    if not evict(namespace, 'q') then return 'q' end
  end
  while total + bytes > room do
    local over, id = furthest_over()
    if not evict(over or namespace, 'p', id) then return 'p' end
  end
end

local function victims_by_name() -- flat: reason and namespace, count, ...
  local flat = {}
  for name, count in pairs(evicted) do
    flat[#flat + 1] = name
    flat[#flat + 1] = count
  end
  return flat
end

-- Operations.

local function admit(id, bytes, namespace, holder, lease, at, ttl)
  local kept, writer, owner = entry(id)
  if kept and writer == KEPT then
    if length(id) ~= kept then
      drop(id) -- gone, or not what was stored
      kept = nil
    elseif owner ~= namespace and owner == NOBODY then
      strike(id, kept, writer, owner) -- now somebody pays for it
      kept = nil
    else
      used_at(id, owner, at, ttl)
      return 'k'
    end
  end
  if kept then
    namespace, bytes = owner, kept -- another put writes it: who came last answers for it
  else
    local refusal = make_room(namespace, bytes)
    if refusal then return refusal end
    charge(namespace, bytes)
  end
  write_entry(id, bytes, holder, namespace)
  call('ZADD', LEASE, int(lease), id)
  return 'w'
end

-- holder, lease ms, ttl ms, then identity, bytes, namespace of each, head of the prefix first
-- -> base tick; per block k(ept already), w(rite it), q(uota), p(ressure); victims
local function reserve()
  local holder, lease, ttl = ARGV[2], now + ARGV[3], tonumber(ARGV[4])
  local count, answers = (#ARGV - 4) / 3, {}
  tick = base + count
  for number = 1, count do
    local at = 2 + 3 * number
    local last_use = base + count + 1 - number -- the tail is older
    answers[number] = admit(ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], holder, lease, last_use, ttl)
  end
  return { int(base), table.concat(answers), victims_by_name() }
end

local function commit_one(id, at, ttl)
  local bytes, holder, namespace = entry(id)
  local there = length(id)
  if not bytes or there < 1 then -- its lease ended, or somebody deleted it: then nobody pays, and it must not stay
    drop(id)
    return 'x'
  end
  if holder ~= KEPT or there ~= bytes then
    charge(namespace, there - bytes)
    write_entry(id, there, KEPT, namespace)
    call('ZREM', LEASE, id)
  end
  if ttl == 0 then call('PERSIST', VALUE .. id) end -- it was written for the time of its lease
  used_at(id, namespace, at, ttl)
  return 'k'
end

-- holder, ttl ms, how many were written, then identity and tick of each of those, then identities that were not
-- -> per written block k(ept) or x
local function commit()
  local ttl, count, answers = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
  for number = 1, count do
    answers[number] = commit_one(ARGV[3 + 2 * number], tonumber(ARGV[4 + 2 * number]), ttl)
  end
  for at = 5 + 2 * count, #ARGV do
    local _, holder = entry(ARGV[at])
    if holder == ARGV[2] then drop(ARGV[at]) end
  end
  return table.concat(answers)
end

-- ttl ms, identities, head first: they were used. What is not there any more is struck.
local function touch()
  local ttl = tonumber(ARGV[2])
  tick = base + #ARGV - 2
  for at = 3, #ARGV do
    local bytes, holder, namespace = entry(ARGV[at])
    if holder == KEPT and length(ARGV[at]) == bytes then
      used_at(ARGV[at], namespace, tick + 3 - at, ttl)
    elseif holder == KEPT then
      drop(ARGV[at])
    end
  end
  return 0
end

-- identities -> how many values there were
local function delete()
  local gone = 0
  for at = 2, #ARGV do
    if drop(ARGV[at]) then gone = gone + 1 end
  end
  return gone
end

-- namespace -> how many values are gone, and whether there are more
local function forget()
  local namespace, gone = ARGV[2], 0
  local ids = call('ZRANGE', USE .. namespace, 0, MOST_FORGOTTEN - 1)
  if #ids == 0 then
    for _, id in ipairs(call('ZRANGE', LEASE, 0, -1)) do
      local _, _, owner = entry(id)
      if owner == namespace then ids[#ids + 1] = id end
    end
  end
  for _, id in ipairs(ids) do
    if drop(id) then gone = gone + 1 end
    call('ZREM', USE .. namespace, id)
    note(namespace)
  end
  return { gone, call('EXISTS', USE .. namespace) }
end

local function adopt(id)
  local bytes, left = length(id), call('PTTL', VALUE .. id)
  if bytes < 1 then return end
  charge(NOBODY, bytes)
  write_entry(id, bytes, KEPT, NOBODY)
  call('ZADD', USE .. NOBODY, 0, id)
  if left > 0 then call('ZADD', EXPIRY, int(now + left), id) end
end

-- where to go on among values, among entries; how many of each -> where to go on. "done": not from this side any more
local function sweep()
  local values, entries, count = ARGV[2], ARGV[3], ARGV[4]
  if values ~= 'done' then
    local found = call('SCAN', values, 'MATCH', VALUE .. 'kv1:*', 'COUNT', count)
    for _, key in ipairs(found[2]) do
      local id = string.sub(key, #VALUE + 1)
      if call('HEXISTS', BLOCK, id) == 0 then adopt(id) end
    end
    values = found[1] == '0' and 'done' or found[1]
  end
  if entries ~= 'done' then
    local found = call('HSCAN', BLOCK, entries, 'COUNT', count)
    for at = 1, #found[2], 2 do
      local id = found[2][at]
      local bytes, holder, namespace = entry(id)
      if holder == KEPT and length(id) ~= bytes then
        drop(id)
      elseif holder == KEPT then
        -- The server may have evicted that set.
        if call('ZADD', USE .. namespace, 'NX', 0, id) == 1 then note(namespace) end
      end
    end
    entries = found[1] == '0' and 'done' or found[1]
  end
  while total > room do
    local namespace, id = furthest_over()
    if not namespace or not evict(namespace, 'p', id) then break end
  end
  return { values, entries, victims_by_name() }
end

-- where to go on -> where to go on; total, room, blocks; namespace, bytes, ...
local function usage()
  save() -- what was due just now
  local found = call('HSCAN', USED, ARGV[2], 'COUNT', 500)
  return { found[1], int(total), int(room), call('HLEN', BLOCK), found[2] }
end

local function rebuild() -- from the entries; what has none is found by a sweep, and is nobody's then
  if call('EXISTS', BLOCK) == 0 then
    for _, namespace in ipairs(call('HKEYS', USED)) do call('DEL', USE .. namespace) end
  end
  call('DEL', USED, OVER)
  used, changed, stale, total = {}, {}, {}, 0
  local found = call('HGETALL', BLOCK)
  for at = 1, #found, 2 do
    local bytes, _, namespace = entry(found[at])
    if bytes then charge(namespace, bytes) end
  end
end

-- room, then namespace, reserved, limit, weight of each: all quotas, instead of those there were
local function install()
  room = tonumber(ARGV[2])
  call('HSET', META, 'room', ARGV[2])
  call('DEL', QUOTA)
  for at = 3, #ARGV, 4 do
    call('HSET', QUOTA, ARGV[at], ARGV[at + 1] .. ' ' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3])
  end
  quotas = {}
  rank_all()
  return 'OK'
end

local operations = {
  reserve = reserve, commit = commit, touch = touch, delete = delete,
  forget = forget, sweep = sweep, usage = usage, install = install,
}

local meta = call('HMGET', META, 'room', 'total', 'tick')
local written = tonumber(meta[2] or nil)
room, total = tonumber(meta[1] or nil), written or 0
tick = tonumber(meta[3] or now * 1000) -- begins above any that an evicted META may have had
base = tick
if not room and ARGV[1] == 'delete' then return delete() end -- of entries that are left, `rebuild` takes care
if not room and ARGV[1] ~= 'install' then return redis.error_reply('NOLEDGER there is none here') end
if not (written and total >= 0 and total < math.huge) or (total > 0 and call('EXISTS', USED, BLOCK) < 2) then
  rebuild() -- the server evicted part of it, or somebody wrote a total that cannot be
elseif string.sub(meta[2], 1, 1) ~= MARK or (total > 0 and call('EXISTS', OVER) == 0) then
  rank_all()
end
if ARGV[1] ~= 'install' then drop_what_is_due() end
local answer = operations[ARGV[1]]()
save()
return answer
