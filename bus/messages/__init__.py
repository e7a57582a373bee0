"""What travels: one frozen struct per message."""
