"""Engine and store put together: what adapters and the command line build on."""
