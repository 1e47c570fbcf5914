"""The operations of Dormouse, each described once for all doors."""
