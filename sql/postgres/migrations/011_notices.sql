-- Programs of version 3 to 10 work with these tables: they send notices without knowing it, and listen to none.

-- The twentieth of a second, counted from 1970, in which the last notice was sent that chunks can be
-- claimed: a number that changes without locks and without waiting for a commit.
create sequence last_notice;
