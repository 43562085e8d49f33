"""What batches do in one call."""


def sizes_of(batch, monkeypatch):
    """How many items each call of a batch has handled, as they are handled."""
    sizes, handle = [], batch._handle
    monkeypatch.setattr(batch, "_handle", lambda items: sizes.append(len(items)) or handle(items))
    return sizes
