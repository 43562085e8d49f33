"""What `kvd doctor` looks at, a file a subject; every finding that is not well names its fix."""
