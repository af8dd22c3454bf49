"""`penteract verify`: a layout trains to the same numbers as one process, or it says where not."""
