"""The generation room: runs samples on engines."""
