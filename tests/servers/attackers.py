"""Clients that attack a server while another one measures how long it has to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ALLOWED_S = 0.5  # that a pause may be longer than without the attack
TRIES = 3  # on a machine that others use too
ATTACKERS = 3


def hold_up_nobody(attack: Callable[[], object], longest_pause: Callable[[float], float], seconds: float) -> None:
    """Hold another client's longest pause beside attackers against the one without them, one try after the other.

    `attack` is called again and again by each attacker. `longest_pause` measures for as long as it is told, here
    `seconds`, and gives seconds.
    """
    longest_pause(0.1)  # what is started when it is first used
    for _ in range(TRIES):
        alone = longest_pause(seconds)
        end = time.monotonic() + seconds

        def attack_till_the_end(end: float = end) -> None:
            while time.monotonic() < end:
                attack()

        attackers = [threading.Thread(target=attack_till_the_end) for _ in range(ATTACKERS)]
        for attacker in attackers:
            attacker.start()
        beside = longest_pause(seconds)
        for attacker in attackers:
            attacker.join()
        print(f"alone {alone:.3f} s, beside {beside:.3f} s")
        if beside < alone + ALLOWED_S:
            break
    assert beside < alone + ALLOWED_S
