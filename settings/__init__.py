"""What a user types, checked: types, ranges, names and the nearest known one."""
