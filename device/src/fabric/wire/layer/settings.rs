// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What faults are wanted, and how people write that: `seed=7,loss=1%,delay=2ms..5ms`.
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::fabric::wire::frame::srd_path;

/// How long a frame that is reordered is held back, at most, if nothing else is said.
const REORDER_TIME: Duration = Duration::from_millis(1);
/// Bytes that wait for a limited rate, at most, if nothing else is said.
const QUEUE: u64 = 256 << 10;
/// Longest time.
const LONGEST: Duration = Duration::from_secs(10);

/// How often something happens to a frame: a part of all, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd)]
pub struct Chance(pub(super) f64);

impl Chance {
    /// Out of a million.
    #[cfg(test)]
    pub(crate) fn millionths(millionths: u32) -> Self {
        Self(f64::from(millionths) / 1e6)
    }
}

/// Faults of the frames of one device, in one direction. The default is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FaultSettings {
    /// With the same seed, the same happens to the frames with the same numbers.
    pub seed: u64,
    /// Frames that are lost.
    pub loss: Chance,
    /// How many of those follow each other, in the mean.
    pub burst: u32,
    /// Frames of which one bit is damaged.
    pub damage: Chance,
    /// Frames that come twice, the second time later.
    pub duplicate: Chance,
    /// Frames in which a router says that it is congested.
    pub mark: Chance,
    /// A router says so if so many bytes wait for the rate.
    pub mark_from: Option<u64>,
    /// Frames that come later than others behind them.
    pub reorder: Chance,
    /// By how much at most these two come later.
    pub reorder_time: Duration,
    /// How much later all frames come: between these.
    pub delay: (Duration, Duration),
    /// Bits in a second, at most.
    pub rate: Option<u64>,
    /// Bytes that wait for that, at most; what comes then is lost.
    pub queue: u64,
    /// These frames are lost, by their numbers, the first of which is 0.
    pub lose: Option<(u64, u64)>,
    /// All of this happens to these frames alone.
    pub frames: Option<(u64, u64)>,
    /// And to reliable datagrams on this path alone.
    pub path: Option<u8>,
    /// How many frames are lost or damaged in any time that is so long, at most: for simulations.
    pub(crate) limit: Option<(usize, Duration)>,
}

impl Default for FaultSettings {
    fn default() -> Self {
        Self {
            seed: 0,
            loss: Chance::default(),
            burst: 1,
            damage: Chance::default(),
            duplicate: Chance::default(),
            mark: Chance::default(),
            mark_from: None,
            reorder: Chance::default(),
            reorder_time: REORDER_TIME,
            delay: (Duration::ZERO, Duration::ZERO),
            rate: None,
            queue: QUEUE,
            lose: None,
            frames: None,
            path: None,
            limit: None,
        }
    }
}

/// Faults of a device, in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DeviceFaults {
    /// Of what its VM sends.
    pub sent: Option<FaultSettings>,
    /// Of what comes for it.
    pub received: Option<FaultSettings>,
}

/// Why a text says no faults.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFaults {
    /// A part is not of the form `name=value`, or has a name that there is not.
    #[error(
        "'{0}' is no fault; there are seed, loss, burst, damage, duplicate, mark, mark-from, reorder, \
         reorder-time, delay, rate, queue, lose, frames and path, each with = and a value"
    )]
    Unknown(String),
    /// A value is not one of its kind.
    #[error("'{1}' of {0} is not {2}")]
    Value(String, String, &'static str),
    /// Something is there twice.
    #[error("{0} is there twice")]
    Twice(String),
}

fn number(text: &str) -> Option<u64> {
    let (digits, unit) = match text.char_indices().last()? {
        (at, 'k' | 'K') => (text.get(..at)?, 1_000),
        (at, 'M') => (text.get(..at)?, 1_000_000),
        (at, 'G') => (text.get(..at)?, 1_000_000_000),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn chance(text: &str) -> Option<Chance> {
    let (number, of) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    let part = number.trim().parse::<f64>().ok()? / of;
    (0.0..=1.0).contains(&part).then_some(Chance(part))
}

/// A time as people write it, up to `longest`.
pub(crate) fn time(text: &str, longest: Duration) -> Option<Duration> {
    let units = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
    ];
    let (number, unit) = units
        .into_iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
    let seconds = number.trim().parse::<f64>().ok()? * unit;
    let time = Duration::try_from_secs_f64(seconds).ok()?;
    (time <= longest).then_some(time)
}

fn delay(text: &str) -> Option<Duration> {
    time(text, LONGEST)
}

/// `A..B`, or `A` for both.
fn range<T: PartialOrd + Clone>(text: &str, one: impl Fn(&str) -> Option<T>) -> Option<(T, T)> {
    let (from, to) = text.split_once("..").unwrap_or((text, text));
    let (from, to) = (one(from)?, one(to)?);
    (from <= to).then_some((from, to))
}

impl FromStr for FaultSettings {
    type Err = BadFaults;

    fn from_str(text: &str) -> Result<Self, BadFaults> {
        let mut settings = Self::default();
        let mut known: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let unknown = || BadFaults::Unknown(part.to_owned());
            let (name, value) = part.split_once('=').ok_or_else(unknown)?;
            if known.contains(&name) {
                return Err(BadFaults::Twice(name.to_owned()));
            }
            known.push(name);
            let good = match name {
                "seed" => number(value).map(|seed| settings.seed = seed),
                "loss" => chance(value).map(|loss| settings.loss = loss),
                "burst" => {
                    let burst = value.parse().ok().filter(|burst| *burst != 0);
                    burst.map(|burst| settings.burst = burst)
                }
                "damage" => chance(value).map(|damage| settings.damage = damage),
                "duplicate" => chance(value).map(|duplicate| settings.duplicate = duplicate),
                "mark" => chance(value).map(|mark| settings.mark = mark),
                "mark-from" => number(value).map(|from| settings.mark_from = Some(from)),
                "reorder" => chance(value).map(|reorder| settings.reorder = reorder),
                "reorder-time" => delay(value).map(|time| settings.reorder_time = time),
                "delay" => range(value, delay).map(|delay| settings.delay = delay),
                "rate" => {
                    let rate = number(value).filter(|rate| *rate != 0);
                    rate.map(|rate| settings.rate = Some(rate))
                }
                "queue" => number(value).map(|queue| settings.queue = queue),
                "lose" => range(value, number).map(|lose| settings.lose = Some(lose)),
                "frames" => range(value, number).map(|frames| settings.frames = Some(frames)),
                "path" => {
                    let path = value.parse().ok().filter(|path| *path < 8);
                    path.map(|path| settings.path = Some(path))
                }
                _ => return Err(unknown()),
            };
            let wanted = match name {
                "loss" | "damage" | "duplicate" | "mark" | "reorder" => "a part, as 0.01 or 1%",
                "reorder-time" => "a time up to 10 s, as 2ms",
                "delay" => "a time up to 10 s, as 2ms, or a range, as 2ms..5ms",
                "lose" | "frames" => "the number of a frame, or a range, as 100..110",
                "path" => "a number from 0 to 7",
                _ => "a number",
            };
            good.ok_or_else(|| BadFaults::Value(name.to_owned(), value.to_owned(), wanted))?;
        }
        Ok(settings)
    }
}

impl fmt::Display for FaultSettings {
    /// As it can be read again: what is not as it is by default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = Self::default();
        write!(f, "seed={}", self.seed)?;
        for (name, chance) in [
            ("loss", self.loss),
            ("damage", self.damage),
            ("duplicate", self.duplicate),
            ("mark", self.mark),
            ("reorder", self.reorder),
        ] {
            if chance != Chance::default() {
                write!(f, ",{name}={}", chance.0)?;
            }
        }
        if self.burst != none.burst {
            write!(f, ",burst={}", self.burst)?;
        }
        if self.reorder_time != none.reorder_time {
            write!(f, ",reorder-time={}ns", self.reorder_time.as_nanos())?;
        }
        if self.delay != none.delay {
            let (least, most) = self.delay;
            write!(f, ",delay={}ns..{}ns", least.as_nanos(), most.as_nanos())?;
        }
        if let Some(rate) = self.rate {
            write!(f, ",rate={rate}")?;
        }
        if let Some(from) = self.mark_from {
            write!(f, ",mark-from={from}")?;
        }
        if self.queue != none.queue {
            write!(f, ",queue={}", self.queue)?;
        }
        if let Some((first, last)) = self.lose {
            write!(f, ",lose={first}..{last}")?;
        }
        if let Some((first, last)) = self.frames {
            write!(f, ",frames={first}..{last}")?;
        }
        if let Some(path) = self.path {
            write!(f, ",path={path}")?;
        }
        Ok(())
    }
}

impl FaultSettings {
    /// Whether a frame is lost whatever chance says.
    pub(super) fn dooms(&self, number: u64) -> bool {
        self.lose
            .is_some_and(|(first, last)| (first..=last).contains(&number))
    }

    /// Whether anything happens to a frame.
    pub(super) fn concerns(&self, number: u64, frame: &[u8]) -> bool {
        let all = (0, u64::MAX);
        let (first, last) = self.frames.unwrap_or(all);
        let on_path = self.path.is_none() || self.path == srd_path(frame);
        (first..=last).contains(&number) && on_path
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<FaultSettings, String> {
        text.parse().map_err(|error: BadFaults| error.to_string())
    }

    #[test]
    fn faults_are_written_as_people_write_them() {
        let all = read(
            "seed=7, loss=1%,burst=20,damage=0.001,duplicate=0.5%,reorder=2%,reorder-time=300us,mark=3%,\
             mark-from=32k,delay=2ms..5ms,rate=100M,queue=64k,lose=100..110,frames=50..500,path=3",
        );
        let expected = FaultSettings {
            seed: 7,
            loss: Chance(0.01),
            burst: 20,
            damage: Chance(0.001),
            duplicate: Chance(0.005),
            mark: Chance(0.03),
            mark_from: Some(32_000),
            reorder: Chance(0.02),
            reorder_time: Duration::from_micros(300),
            delay: (Duration::from_millis(2), Duration::from_millis(5)),
            rate: Some(100_000_000),
            queue: 64_000,
            lose: Some((100, 110)),
            frames: Some((50, 500)),
            path: Some(3),
            limit: None,
        };
        assert_eq!(all, Ok(expected));
        let fixed = read("delay=1s,lose=3").unwrap();
        assert_eq!(
            fixed.delay,
            (Duration::from_secs(1), Duration::from_secs(1))
        );
        assert_eq!(fixed.lose, Some((3, 3)));
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_a_sentence() {
        for (text, why) in [
            ("", "'' is no fault; there are seed, loss"),
            ("lost=1%", "'lost=1%' is no fault"),
            ("loss", "'loss' is no fault"),
            ("loss=101%", "'101%' of loss is not a part, as 0.01 or 1%"),
            ("loss=-1%", "'-1%' of loss is not a part"),
            ("loss=NaN", "'NaN' of loss is not a part"),
            ("delay=5", "'5' of delay is not a time up to 10 s"),
            ("delay=5ms..2ms", "'5ms..2ms' of delay is not a time"),
            ("delay=11s", "'11s' of delay is not a time"),
            ("delay=-1s", "'-1s' of delay is not a time"),
            ("lose=7..3", "'7..3' of lose is not the number of a frame"),
            ("rate=0", "'0' of rate is not a number"),
            ("path=8", "'8' of path is not a number from 0 to 7"),
            ("burst=0", "'0' of burst is not a number"),
            ("seed=1,seed=2", "seed is there twice"),
            ("rate=99999999999G", "is not a number"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    proptest! {
        #[test]
        fn what_is_told_can_be_read_again(
            seed: u64, parts in proptest::array::uniform5(0f64..=1.0), burst in 1u32..,
            delay in 0u64..1_000_000, rate in proptest::option::of(1u64..), queue: u64,
        ) {
            let settings = FaultSettings {
                seed,
                loss: Chance(parts[0]),
                damage: Chance(parts[1]),
                duplicate: Chance(parts[2]),
                reorder: Chance(parts[3]),
                mark: Chance(parts[4]),
                mark_from: rate,
                burst,
                delay: (Duration::from_nanos(delay / 2), Duration::from_nanos(delay)),
                rate,
                queue,
                ..FaultSettings::default()
            };
            prop_assert_eq!(read(&settings.to_string()), Ok(settings));
        }

        #[test]
        fn no_text_does_harm(text in "[a-z=%.,0-9]{0,40}") {
            let _ = read(&text);
        }
    }
}
