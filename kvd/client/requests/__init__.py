"""What a worker has asked for, and what becomes of it when its daemon answers, is lost, or starts anew. Pure."""
