"""The one loop that every host shares: phases, decisions, plans and their renewal."""
