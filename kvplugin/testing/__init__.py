"""What authors of connectors and policies test with; imports nothing heavy."""
