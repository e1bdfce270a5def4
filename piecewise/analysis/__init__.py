"""What is known of a traced graph before it is cut."""
