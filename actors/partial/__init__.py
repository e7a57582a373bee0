"""The partial room: keeps interrupted samples."""
