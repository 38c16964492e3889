"""What an operator may say: sections, loading, messages, the generated reference."""
