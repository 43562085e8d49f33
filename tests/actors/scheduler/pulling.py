"""What tests of pulls share."""

from kvd.protocol.peer import Grant
from tests.actors.stage import welcome_of


def outcome(stage):
    [item] = stage.notified
    return item


def start_reading(stage, **pull):
    assert stage.pull(**pull) == []
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert ("read", 1) in stage.commands
