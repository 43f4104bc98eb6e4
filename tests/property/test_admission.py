"""Any interleaving of requests, policies and steps keeps the promises of admission. No model: many can be tried."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamina.engine.plan import StepPlan
from lamina.engine.request import Choice
from lamina_kvtier import Quota
from support.planned import BLOCK, Planned, prompt

TENANTS = ("a", "b", "c")


@st.composite
def policies(draw: st.DrawFn, coverable: int) -> dict[str, Quota]:
    found, left = {}, coverable
    for tenant in draw(st.sets(st.sampled_from(TENANTS))):
        reserved = draw(st.sampled_from([0, left // 4, left // 2]))
        left -= reserved
        limit = draw(st.sampled_from([reserved, reserved + 6, 10_000]))
        found[tenant] = Quota(reserved, limit, 0, draw(st.sampled_from([1.0, 3.0])))
    return found


class AdmissionMachine(RuleBasedStateMachine):
    """Three tenants on a pool that is always too small."""

    @initialize(
        blocks=st.integers(12, 32), chunk=st.sampled_from([12, 40, 200]), seats=st.integers(2, 8), data=st.data()
    )
    def start(self, blocks: int, chunk: int, seats: int, data: st.DataObject) -> None:
        self.sim = Planned(blocks, max_batch_tokens=chunk, max_running=seats)
        self.book = self.sim.kv.ledger.book  # type: ignore[union-attr]
        self.policy = data.draw(policies(self.book.coverable))
        self.book.load(self.policy)
        self.changed = False
        self.requests = 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        seed=st.integers(0, 5),
        tokens=st.integers(1, 4 * BLOCK),
        most=st.integers(1, 6 * BLOCK),
        part=st.sampled_from([0.2, 1.0, 1.0]),
        n=st.sampled_from([1, 1, 2]),
        count=st.sampled_from([1, 1, 3]),
    )
    def submit(self, tenant: str, seed: int, tokens: int, most: int, part: float, n: int, count: int) -> None:
        for number in range(count):
            name = f"{tenant}{self.requests}"
            self.requests += 1
            ends_after = max(1, int(most * part))
            self.sim.submit(name, prompt(seed + number, 4)[:tokens], max_tokens=most, ends_after=ends_after, n=n)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            assured = {
                choice.request.request.request_id: choice
                for choice in self.sim.scheduler.running
                if self.sim.scheduler.admission.is_assured(choice)
            }
            heads = [head for head in self.sim.scheduler.queue.heads() if self.is_entitled(head)]
            before = len(self.sim.preempted)
            plan = self.sim.step()
            self.start_at_once(heads, plan)
            lost = assured.keys() & set(self.sim.preempted[before:])
            assert self.changed or not lost, f"{lost} was promised not to be preempted"

    def is_entitled(self, choice: Choice) -> bool:
        return self.sim.scheduler.admission.decide(choice).entitled

    def start_at_once(self, heads: list[Choice], plan: StepPlan) -> None:
        """Within its reservation a choice waits for compute or for a seat, if all seats are of such as itself."""
        scheduler = self.sim.scheduler
        if scheduler._prefill_left(plan) <= 0:
            return
        for head in heads:
            if head in scheduler.queue and head not in plan.preempted and self.is_entitled(head):
                assert not scheduler._has_seats(head), "it waits for blocks that are its own"
                assert scheduler.admission.gives_way(scheduler.running, head) is None

    @rule(data=st.data())
    def policy_changes(self, data: st.DataObject) -> None:
        self.book.load(data.draw(policies(self.book.coverable)))
        self.changed = True

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.sim.scheduler.running:
            self.sim.scheduler.finish(data.draw(st.sampled_from(self.sim.scheduler.running)))

    @invariant()
    def promises_are_covered(self) -> None:
        """Whatever runs, each namespace could have its reservation: others have so little that is assured."""
        if not hasattr(self, "sim") or self.changed:
            return
        ledger = self.sim.kv.ledger
        assert ledger is not None
        admission = self.sim.scheduler.admission
        for tenant in TENANTS:
            mine = [choice for choice in self.sim.scheduler.running if choice.request.tenant == tenant]
            held = {block for choice in mine if admission.is_assured(choice) for block in choice.table}
            ahead = ledger.account(tenant).ahead
            assert len(held) + ahead <= ledger.book.of(tenant).reserved

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.run(self.sim.steps + 20_000)
        ledger = self.sim.kv.ledger
        assert ledger is not None
        assert all(account.firm == account.pending == account.ahead == 0 for account in ledger.accounts.values())
        assert len(self.sim.preempted) <= self.sim.drawn + len(self.sim.started)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
