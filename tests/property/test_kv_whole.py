"""Manager, ledger, pins, host memory, store and all that moves blocks between them keep every rule, whatever happens.

`support/whole_machine.py` says what is modelled and what is compared after each rule; `test_kv_whole_detects.py` that
it would notice.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from support.whole_machine import MovingMachine, WholeMachine

_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestWholeMachine = WholeMachine.TestCase
TestWholeMachine.settings = _SETTINGS
TestMovingMachine = MovingMachine.TestCase
TestMovingMachine.settings = _SETTINGS
