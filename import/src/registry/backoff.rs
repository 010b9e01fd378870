//! Trying again: after waits that grow and are not the same for all, with an end.
//!
//! Run by: the user, in the importer.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::notes::Notes;
use super::transport::{Timing, Trouble, TroubleKind};

/// Waits shorter than this are not worth a word.
const WORTH_TELLING: Duration = Duration::from_secs(2);

/// How often something has been tried since it last got further.
#[derive(Default)]
pub struct Backoff {
    attempts: u32,
    /// What servers have made us wait, in all.
    waited: Duration,
}

impl Backoff {
    /// Waits for the next attempt, or gives the trouble back where there is none. `was_there` says that the server has
    /// answered before: then it may come back, if nobody finds it now.
    pub fn wait(
        &mut self,
        trouble: Trouble,
        was_there: bool,
        timing: &Timing,
        notes: &Notes,
    ) -> Result<(), Trouble> {
        self.attempts += 1;
        let grown = timing.first_wait.saturating_mul(1 << (self.attempts - 1).min(16));
        let grown = grown.min(timing.longest_wait);
        let wait = match trouble.kind {
            TroubleKind::Busy(Some(after)) => {
                self.waited = self.waited.saturating_add(after);
                if self.waited > timing.longest_retry_after {
                    return Err(trouble);
                }
                after + jitter(timing.first_wait)
            }
            TroubleKind::Busy(None) | TroubleKind::Passing => grown / 2 + jitter(grown),
            TroubleKind::Unreachable if was_there => grown / 2 + jitter(grown),
            _ => return Err(trouble),
        };
        if self.attempts >= timing.attempts {
            return Err(trouble);
        }
        if wait >= WORTH_TELLING {
            notes.tell(&format!("{}; waiting {} s", trouble.failure, wait.as_secs()));
        }
        std::thread::sleep(wait);
        Ok(())
    }
}

/// Something between nothing and `most`. Not for secrets.
fn jitter(most: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) % 1000;
    most.mul_f64(random as f64 / 1000.0)
}

/// The header Retry-After: seconds, or a time. Docker Hub also sends the time as seconds since 1970.
pub fn parse_retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    let now = now.duration_since(UNIX_EPOCH).ok()?.as_secs();
    let seconds = match text.parse::<u64>() {
        Ok(time) if time > 1_000_000_000 => time.saturating_sub(now),
        Ok(seconds) => seconds,
        Err(_) => http_time(text)?.saturating_sub(now),
    };
    Some(Duration::from_secs(seconds))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT` in seconds since 1970.
fn http_time(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split([' ', ':']).collect();
    let [_, day, month, year, hour, minute, second, "GMT"] = words.as_slice() else { return None };
    let month = 1 + MONTHS.iter().position(|name| name == month)? as u64;
    let (year, day) = (year.parse::<u64>().ok()?, day.parse::<u64>().ok()?);
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    let time = |text: &str| text.parse::<u64>().ok().filter(|value| *value <= 60);
    // Years begin in March here, so that the leap day is the last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    let days = 365 * year + leap_days + (153 * month + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(((days * 24 + time(hour)?) * 60 + time(minute)?) * 60 + time(second)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mizzen_core::Failure;

    #[test]
    fn times_are_understood() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777 - 30);
        for (text, seconds) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(30)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", Some(0)),
            ("7", Some(7)),
            (" 120 ", Some(120)),
            ("1900000000", Some(1_900_000_000 - 784_111_747)),
            ("soon", None),
            ("-1", None),
            ("Sun, 06 Nov 0000 08:49:37 GMT", None),
            ("Sun, 06 Foo 1994 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 99:49:37 GMT", None),
        ] {
            assert_eq!(parse_retry_after(text, now).map(|time| time.as_secs()), seconds, "{text}");
        }
        assert_eq!(http_time("Thu, 29 Feb 2024 00:00:00 GMT"), Some(1_709_164_800));
        assert_eq!(http_time("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
    }

    #[test]
    fn waiting_has_an_end() {
        let timing = Timing {
            attempts: 3,
            first_wait: Duration::from_millis(1),
            longest_retry_after: Duration::from_millis(2),
            ..Timing::default()
        };
        let notes = Notes::silent();
        let trouble = |kind| Trouble { failure: Failure::new("x"), kind };
        let tries = |kind: TroubleKind, was_there: bool| {
            let mut backoff = Backoff::default();
            (1..).find(|_| backoff.wait(trouble(kind), was_there, &timing, &notes).is_err()).unwrap()
        };
        assert_eq!(tries(TroubleKind::Passing, false), 3);
        assert_eq!(tries(TroubleKind::Unreachable, false), 1);
        assert_eq!(tries(TroubleKind::Unreachable, true), 3);
        assert_eq!(tries(TroubleKind::Lasting, true), 1);
        assert_eq!(tries(TroubleKind::Busy(Some(Duration::from_millis(1))), false), 3);
        assert_eq!(tries(TroubleKind::Busy(Some(Duration::from_secs(9))), false), 1);
    }
}
