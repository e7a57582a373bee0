"""The publisher room: decides who serves which version."""
