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
--
-- What a call decides it remembers, and writes at its end; a server that is short of memory, or may not write, refuses a
-- script's first write or none. So an error on the way, as of a key that is somebody else's, leaves entries and charges as
-- they were, in agreement. Values may be gone by then, and OVER and queues of use are written on the way, where the next
-- victim is read from them: what these say too little is mended by a sweep, and by the next charge.

local KEPT, NOBODY = '-', ''
local MOST_VICTIMS, MOST_DUE, MOST_FORGOTTEN = 1000, 256, 256 -- of one call: nobody else is served meanwhile
local MOST_AT_ONCE = 1000 -- fields or members of one command; Lua cannot unpack 8,000. Even: some come in pairs
local MOST_AHEAD = 64 -- victims that are looked up before they are needed

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

local spelled = {}

local function int(number)
  -- Formatting is as slow as a command, and blocks are of one length.
  spelled[number] = spelled[number] or string.format('%.0f', number)
  return spelled[number]
end

-- Many at once: a command costs more than what it does with one field or member. Yet not much more than a small table or
-- two, so lists are the commands themselves. Numbers in them are exact integers, or scores: the server spells them in full.

local function ask(hash, fields) -- the values; false: there is none
  if #fields <= MOST_AT_ONCE then return fields[1] and call('HMGET', hash, unpack(fields)) or {} end
  local values = {}
  for first = 1, #fields, MOST_AT_ONCE do
    local last = math.min(first + MOST_AT_ONCE - 1, #fields)
    for _, value in ipairs(call('HMGET', hash, unpack(fields, first, last))) do values[#values + 1] = value end
  end
  return values
end

local function tell(command, head) -- not if it ends with its first `head` words; -> sum of what the server answers
  if #command <= head then return 0 end
  if #command <= head + MOST_AT_ONCE then return call(unpack(command)) end
  local sum = 0
  for first = head + 1, #command, MOST_AT_ONCE do
    local part = { unpack(command, 1, head) }
    for at = first, math.min(first + MOST_AT_ONCE - 1, #command) do part[#part + 1] = command[at] end
    sum = sum + call(unpack(part))
  end
  return sum
end

-- Charges. Read once, written once.

local quotas, used = {}, {}
local changed, stale = {}, {} -- namespaces: USED, OVER do not say any more how they are
local barren = {} -- namespaces that OVER has as those without kept blocks: for this call they have none to give

local rights = {} -- text -> what it says; many namespaces have the same, or none

local function read_rights(text)
  if not rights[text] then
    local reserved, limit, weight = string.match(text, '^(%S+) (%S+) (%S+)$')
    rights[text] = {
      reserved = tonumber(reserved or 0), limit = tonumber(limit or math.huge), weight = tonumber(weight or 1),
    }
  end
  return rights[text]
end

local function read_accounts(namespaces)
  local new = {}
  for _, namespace in ipairs(namespaces) do
    if not (quotas[namespace] and used[namespace]) then new[#new + 1] = namespace end
  end
  local texts, charges = ask(QUOTA, new), ask(USED, new)
  for at, namespace in ipairs(new) do
    quotas[namespace] = read_rights(texts[at] or '')
    used[namespace] = used[namespace] or tonumber(charges[at] or 0)
  end
end

local function quota_of(namespace)
  if not quotas[namespace] then read_accounts({ namespace }) end
  return quotas[namespace]
end

local function used_of(namespace)
  if not used[namespace] then read_accounts({ namespace }) end
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

local function rank(namespaces, without_kept) -- keys of these
  local places = { 'ZADD', OVER }
  for namespace in pairs(namespaces) do
    if used_of(namespace) <= 0 then
      call('ZREM', OVER, namespace)
    else
      local over = over_share(namespace)
      local last = without_kept[namespace] and '+inf'
      places[#places + 1] = last or (over == math.huge and '-inf' or -over)
      places[#places + 1] = namespace
    end
  end
  tell(places, 2)
end

local function rank_all() -- O(namespaces): with new quotas, or when OVER cannot be relied on
  call('DEL', OVER)
  local namespaces = call('HKEYS', USED)
  read_accounts(namespaces)
  for _, namespace in ipairs(namespaces) do note(namespace) end
end

local function write_charges()
  local charges, gone = { 'HSET', USED }, { 'HDEL', USED }
  for namespace in pairs(changed) do
    if used_of(namespace) > 0 then
      charges[#charges + 1] = namespace
      charges[#charges + 1] = used[namespace]
    else
      gone[#gone + 1] = namespace
    end
  end
  tell(charges, 2)
  tell(gone, 2)
  call('HSET', META, 'total', MARK .. int(total), 'tick', tick)
end

-- Queues of use, each read from its old end.

local queues = {}
local joining = false -- whether any has blocks that the server does not know of yet

local function queue_of(namespace)
  local queue = queues[namespace]
  if not queue then
    queue = {
      key = USE .. namespace,
      left = false, joined = false, -- commands to be written, in this order
      used = false, -- whether a block is there for certain: this call has used it
      ahead = false, at = 1, asked = 0, -- oldest blocks and their ticks, as read; the next of them; how many were asked for
      moved = false, -- identities that are not any more where they were read
    }
    queues[namespace] = queue
  end
  return queue
end

local function without_queue(namespaces) -- a list -> keys: those of them
  local exist, none = { 'EXISTS' }, {}
  for at, namespace in ipairs(namespaces) do exist[at + 1] = USE .. namespace end
  if tell(exist, 1) < #namespaces then -- hardly ever
    for _, namespace in ipairs(namespaces) do none[namespace] = call('EXISTS', USE .. namespace) == 0 or nil end
  end
  return none
end

local function write_queues()
  local joined = {}
  for namespace, queue in pairs(queues) do
    if queue.joined then joined[#joined + 1] = namespace end
  end
  -- Their first kept blocks, or the server evicted the set: they may be ranked as those without any.
  for namespace in pairs(without_queue(joined)) do note(namespace) end
  for _, queue in pairs(queues) do
    if queue.left then tell(queue.left, 2) end
    if queue.joined then tell(queue.joined, 3) end
    queue.left, queue.joined = false, false
  end
  joining = false
end

local function join_queue(namespace, id, at)
  local queue = queue_of(namespace)
  local joined = queue.joined
  if joined then
    joined[#joined + 1] = at
    joined[#joined + 1] = id
  else
    queue.joined = { 'ZADD', queue.key, 'GT', at, id }
  end
  if queue.moved then queue.moved[id] = true end
  queue.used, joining = true, true
end

local function leave_queue(namespace, id)
  local queue = queue_of(namespace)
  if queue.joined then write_queues() end
  if queue.left then
    queue.left[#queue.left + 1] = id
  else
    queue.left = { 'ZREM', queue.key, id }
  end
  if queue.moved then queue.moved[id] = true end
  queue.used = false
end

local function look_ahead(queue, count)
  if queue.joined then write_queues() end
  if queue.left then tell(queue.left, 2) end
  queue.ahead = call('ZRANGE', queue.key, 0, count - 1, 'WITHSCORES')
  queue.at, queue.asked, queue.moved, queue.left = 1, count, {}, false
end

local function next_of(queue) -- of what was read; not what this very call has used
  local ahead, at = queue.ahead, queue.at
  while queue.moved[ahead[at]] do at = at + 2 end
  queue.at = at
  return ahead[at] and tonumber(ahead[at + 1]) <= base and ahead[at]
end

local function without_kept(namespaces) -- keys of these -> keys: those of them
  local unsure = {}
  for namespace in pairs(namespaces) do
    local queue = queues[namespace]
    if not (queue and (queue.used or queue.ahead and next_of(queue))) then unsure[#unsure + 1] = namespace end
  end
  return without_queue(unsure)
end

-- Blocks. What BLOCK, LEASE, EXPIRY and values do not have like that yet is in these.

local texts, rewritten = {}, {} -- identity -> its entry, false: none; identities
local leases, expiries = {}, {} -- identity -> score, false: none
local ends = {} -- identity -> when its value does, false: never
local dropped, unlinked = {}, { 'UNLINK' } -- identities; their values' keys

local function read_entries(ids)
  local new = {}
  for _, id in ipairs(ids) do
    if texts[id] == nil then new[#new + 1] = id end
  end
  for at, text in ipairs(ask(BLOCK, new)) do texts[new[at]] = text end
end

local function entry(id)
  local text = texts[id]
  if text == nil then
    text = call('HGET', BLOCK, id)
    texts[id] = text
  end
  if not text then return end
  local bytes, holder, namespace = string.match(text, '^(%d+) (%S+) (.*)$')
  return tonumber(bytes), holder, namespace
end

local function read_owners(ids) -- entries, and accounts of those that pay
  read_entries(ids)
  local seen, owners = {}, {}
  for _, id in ipairs(ids) do
    local _, _, namespace = entry(id)
    if namespace and not seen[namespace] then
      seen[namespace] = true
      owners[#owners + 1] = namespace
    end
  end
  read_accounts(owners)
end

local function write_entry(id, bytes, holder, namespace)
  texts[id], rewritten[id] = int(bytes) .. ' ' .. holder .. ' ' .. namespace, true
end

local function length(id) -- of the value; 0: there is none
  if dropped[id] then return 0 end
  local found = redis.pcall('STRLEN', VALUE .. id)
  return type(found) == 'number' and found or -1 -- of another type: somebody else's
end

local some_expire = call('EXISTS', EXPIRY) == 1

local function expire(id, at) -- false: never
  some_expire = some_expire or at ~= false
  if some_expire then expiries[id] = at end
end

local function strike(id, bytes, holder, namespace)
  texts[id], rewritten[id] = false, true
  if holder == KEPT then
    leave_queue(namespace, id)
  else
    leases[id] = false
  end
  expire(id, false)
  charge(namespace, -bytes)
end

local function drop(id)
  local bytes, holder, namespace = entry(id)
  if bytes then strike(id, bytes, holder, namespace) end
  if not dropped[id] then
    dropped[id] = true
    unlinked[#unlinked + 1] = VALUE .. id
  end
end

local function used_at(id, namespace, at, ttl)
  join_queue(namespace, id, at)
  if ttl > 0 then
    ends[id] = now + ttl
    expire(id, ends[id])
  elseif some_expire then
    ends[id] = false
    expire(id, false)
  end
end

local function unlink() -- -> how many values there were
  local gone = tell(unlinked, 1)
  dropped, unlinked = {}, { 'UNLINK' }
  return gone
end

local function write_entries()
  local fields, gone = { 'HSET', BLOCK }, { 'HDEL', BLOCK }
  for id in pairs(rewritten) do
    if texts[id] then
      fields[#fields + 1] = id
      fields[#fields + 1] = texts[id]
    else
      gone[#gone + 1] = id
    end
  end
  tell(fields, 2)
  tell(gone, 2)
  rewritten = {}
end

local function write_scores(set, scores)
  local members, gone = { 'ZADD', set }, { 'ZREM', set }
  for id, score in pairs(scores) do
    if score then
      members[#members + 1] = score
      members[#members + 1] = id
    else
      gone[#gone + 1] = id
    end
  end
  tell(members, 2)
  tell(gone, 2)
end

local function write_blocks()
  unlink()
  write_entries()
  write_scores(LEASE, leases)
  write_scores(EXPIRY, expiries)
  for id, at in pairs(ends) do
    if at then call('PEXPIREAT', VALUE .. id, at) else call('PERSIST', VALUE .. id) end
  end
  leases, expiries, ends = {}, {}, {}
end

local function save()
  write_blocks()
  write_charges()
  write_queues()
  local none = without_kept(changed)
  for namespace in pairs(changed) do
    if none[namespace] ~= barren[namespace] then stale[namespace] = true end
  end
  rank(stale, none)
  changed, stale = {}, {}
end

local function drop_due(set, scores)
  local due = call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, MOST_DUE)
  if #due > 0 then read_owners(due) end
  for _, id in ipairs(due) do
    drop(id)
    scores[id] = false
  end
end

local function drop_what_is_due()
  drop_due(LEASE, leases)
  if some_expire then drop_due(EXPIRY, expiries) end
  unlink() -- so nobody's operation counts them
end

-- Victims.

local evicted, victims = {}, 0
local ranked_ahead = 1 -- how many of the first in OVER have been looked up at once

local function oldest(namespace) -- never what this very call has used
  local queue = queue_of(namespace)
  if not queue.ahead then look_ahead(queue, 1) end
  local id = next_of(queue)
  while not id and queue.at > 2 * queue.asked do -- all of these are gone
    look_ahead(queue, math.min(2 * queue.asked, MOST_AHEAD))
    id = next_of(queue)
  end
  return id
end

local function evict(namespace, reason, id) -- the identity, where it is known already
  id = victims < MOST_VICTIMS and (id or oldest(namespace))
  if not id then return false end
  victims = victims + 1
  local before = used_of(namespace)
  drop(id)
  if victims == 1 then unlink() end -- at once: as a first write no server refuses it for want of memory
  if used_of(namespace) == before then -- the ledger had lost its entry
    leave_queue(namespace, id)
    note(namespace)
  end
  local name = reason .. namespace
  evicted[name] = (evicted[name] or 0) + 1
  return true
end

local function first_ranked()
  local namespace = call('ZRANGE', OVER, 0, 0)[1]
  if namespace and not quotas[namespace] then -- those behind it are likely to be next
    ranked_ahead = math.min(2 * ranked_ahead, MOST_AHEAD)
    read_accounts(call('ZRANGE', OVER, 0, ranked_ahead - 1))
  end
  return namespace
end

local function furthest_over() -- and its oldest block; nil: nobody has one beyond its reservation
  while true do
    if joining then write_queues() end
    rank(stale, barren)
    stale = {}
    local namespace = first_ranked()
    if not namespace or barren[namespace] or over_share(namespace) <= 0 then return end
    local id = oldest(namespace)
    if id then return namespace, id end
    barren[namespace] = true -- all that it has is being written, or was used just now
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

local function every(step, first, last) -- such arguments
  local some = {}
  for at = first, last or #ARGV, step do some[#some + 1] = ARGV[at] end
  return some
end

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
  leases[id] = lease
  return 'w'
end

-- holder, lease ms, ttl ms, then identity, bytes, namespace of each, head of the prefix first
-- -> base tick; per block k(ept already), w(rite it), q(uota), p(ressure); victims
local function reserve()
  local holder, lease, ttl = ARGV[2], now + ARGV[3], tonumber(ARGV[4])
  local count, answers = (#ARGV - 4) / 3, {}
  tick = base + count
  read_entries(every(3, 5))
  read_accounts(every(3, 7))
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
    if there ~= bytes then charge(namespace, there - bytes) end
    write_entry(id, there, KEPT, namespace)
    leases[id] = false
  end
  if ttl == 0 then ends[id] = false end -- it was written for the time of its lease
  used_at(id, namespace, at, ttl)
  return 'k'
end

-- holder, ttl ms, how many were written, then identity and tick of each of those, then identities that were not
-- -> per written block k(ept) or x
local function commit()
  local ttl, count, answers = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
  local lost = every(1, 5 + 2 * count)
  read_entries(every(2, 5, 4 + 2 * count))
  read_owners(lost)
  for number = 1, count do
    answers[number] = commit_one(ARGV[3 + 2 * number], tonumber(ARGV[4 + 2 * number]), ttl)
  end
  for _, id in ipairs(lost) do
    local _, holder = entry(id)
    if holder == ARGV[2] then drop(id) end
  end
  return table.concat(answers)
end

-- ttl ms, identities, head first: they were used. What is not there any more is struck.
local function touch()
  local ttl = tonumber(ARGV[2])
  tick = base + #ARGV - 2
  read_entries(every(1, 3))
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
  local ids = every(1, 2)
  read_owners(ids)
  for _, id in ipairs(ids) do drop(id) end
  return unlink()
end

-- namespace -> how many values are gone, and whether there are more
local function forget()
  local namespace = ARGV[2]
  local ids = call('ZRANGE', USE .. namespace, 0, MOST_FORGOTTEN - 1)
  if #ids == 0 then
    local written = call('ZRANGE', LEASE, 0, -1)
    read_entries(written)
    for _, id in ipairs(written) do
      local _, _, owner = entry(id)
      if owner == namespace then ids[#ids + 1] = id end
    end
  end
  read_owners(ids)
  for _, id in ipairs(ids) do
    drop(id)
    leave_queue(namespace, id)
    note(namespace)
  end
  write_queues()
  return { unlink(), call('EXISTS', USE .. namespace) }
end

local function adopt(id)
  local bytes, left = length(id), call('PTTL', VALUE .. id)
  if bytes < 1 then return end
  charge(NOBODY, bytes)
  write_entry(id, bytes, KEPT, NOBODY)
  call('ZADD', USE .. NOBODY, 0, id)
  if left > 0 then expire(id, now + left) end
end

-- where to go on among values, among entries; how many of each -> where to go on. "done": not from this side any more
local function sweep()
  local values, entries, count = ARGV[2], ARGV[3], ARGV[4]
  if values ~= 'done' then
    local found = call('SCAN', values, 'MATCH', VALUE .. 'kv1:*', 'COUNT', count)
    local ids = {}
    for at, key in ipairs(found[2]) do ids[at] = string.sub(key, #VALUE + 1) end
    read_entries(ids)
    for _, id in ipairs(ids) do
      if not texts[id] then adopt(id) end
    end
    values = found[1] == '0' and 'done' or found[1]
  end
  if entries ~= 'done' then
    local found = call('HSCAN', BLOCK, entries, 'COUNT', count)
    for at = 1, #found[2], 2 do
      local id = found[2][at]
      if texts[id] == nil then texts[id] = found[2][at + 1] end
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
    texts[found[at]] = found[at + 1]
    local bytes, _, namespace = entry(found[at])
    if bytes then charge(namespace, bytes) end
  end
end

-- room, then namespace, reserved, limit, weight of each: all quotas, instead of those there were
local function install()
  room = tonumber(ARGV[2])
  call('HSET', META, 'room', ARGV[2])
  call('DEL', QUOTA)
  local fields = { 'HSET', QUOTA }
  for at = 3, #ARGV, 4 do
    fields[#fields + 1] = ARGV[at]
    fields[#fields + 1] = ARGV[at + 1] .. ' ' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3]
  end
  tell(fields, 2)
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
if not room and ARGV[1] == 'delete' then
  local gone = delete()
  write_blocks() -- and no charges: of entries that are left, `rebuild` takes care
  write_queues()
  return gone
end
if not room and ARGV[1] ~= 'install' then return redis.error_reply('NOLEDGER there is none here') end
if not written or total < 0 or (total > 0 and call('EXISTS', USED, BLOCK) < 2) then
  rebuild() -- the server evicted part of it, or somebody wrote a total that cannot be
elseif string.sub(meta[2], 1, 1) ~= MARK or (total > 0 and call('EXISTS', OVER) == 0) then
  rank_all()
end
if ARGV[1] ~= 'install' then drop_what_is_due() end
local answer = operations[ARGV[1]]()
save()
return answer
