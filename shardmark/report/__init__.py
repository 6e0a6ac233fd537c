"""What people read of the rows."""
