from kvd.transport.nixl.poll_interval import IDLE, PROMPT, RECENT, RECENT_SPAN, PollInterval


def test_the_interval_is_prompt_while_anything_waits_and_grows_to_idle() -> None:
    interval = PollInterval()
    assert interval.seconds(0.0, in_flight=False) == IDLE
    assert interval.seconds(0.0, in_flight=True) == PROMPT
    interval.touch(10.0)
    assert interval.seconds(10.0 + 0.9 * RECENT_SPAN, in_flight=False) == RECENT
    assert interval.seconds(10.0 + 1.1 * RECENT_SPAN, in_flight=False) == IDLE
    interval.readers_expected = True
    assert interval.seconds(99.0, in_flight=False) == PROMPT
