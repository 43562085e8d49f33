"""The checks of `kvd doctor`, a file for each subject; every bad finding names its fix."""
