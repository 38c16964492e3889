"""What a call sends: its body, form and images, bounded, checked and stored."""
