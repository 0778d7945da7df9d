"""What `chord bench` runs: scenarios, floors, the check of every result, records and charts."""
