from kvd.layout import Chunked, Full, Sliding, State


def attended(window, tokens: int) -> set[int]:
    """The tokens before number `tokens` that it attends to, by the definition of each kind of attention."""
    match window:
        case Sliding(window=size):
            return {token for token in range(tokens) if tokens - token < size}
        case Chunked(chunk=size):
            return {token for token in range(tokens) if token // size == tokens // size}
    return set(range(tokens))


def test_exactly_the_blocks_of_attended_tokens_are_needed() -> None:
    windows = [Full(), *(Sliding(size) for size in range(1, 40)), *(Chunked(size) for size in range(1, 40))]
    for window in windows:
        for block in (1, 2, 3, 4, 16):
            for tokens in range(80):
                expected = {token // block for token in attended(window, tokens)}
                assert set(window.needed(tokens, block)) == expected, (window, tokens, block)


def test_needed_positions_are_those_of_the_published_formulas() -> None:
    for tokens in range(1, 200):
        end = -(-tokens // 16)
        assert Full().needed(tokens, 16) == range(end)
        assert Sliding(24).needed(tokens, 16) == range(max(0, tokens - 23) // 16, end)
        assert list(Chunked(64).needed(tokens, 16)) == list(range(tokens // 64 * 64 // 16, end))
        assert State().needed(tokens, 16) == range(end - 1, end)


def test_a_window_of_24_needs_two_or_three_blocks_of_16_and_never_more() -> None:
    counts = {tokens % 16: len(Sliding(24).needed(tokens, 16)) for tokens in range(64, 160)}
    assert set(counts.values()) == {2, 3}
    assert [tokens for tokens, count in counts.items() if count == 3] == [1, 2, 3, 4, 5, 6]


def test_only_the_blocks_of_the_last_partial_chunk_are_needed_and_none_at_its_end() -> None:
    for tokens in (1, 8191, 8193, 100_000, 98_305, 131_071):
        assert len(Chunked(8192).needed(tokens, 16)) == -(-(tokens % 8192) // 16)
    for chunks in range(1, 13):
        assert not Chunked(8192).needed(chunks * 8192, 16)


def test_an_engine_that_computes_the_last_token_again_needs_the_chunk_that_ends_there() -> None:
    assert len(Chunked(8192).needed(8192 - 1, 16)) == 512


def test_the_last_state_is_at_the_position_of_the_last_token() -> None:
    assert [list(State().needed(tokens, 4)) for tokens in (0, 1, 4, 5, 8)] == [[], [0], [0], [1], [1]]


def test_nothing_is_needed_before_the_first_token() -> None:
    for window in (Full(), Sliding(8), Chunked(8), State()):
        assert not window.needed(0, 16)
