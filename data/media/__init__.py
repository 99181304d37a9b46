"""Pictures and sound: reading them from packages and files, measuring, decoding, collating."""
