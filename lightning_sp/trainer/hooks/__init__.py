"""Lightning's hooks around a batch, as their users wrote them for one device."""
