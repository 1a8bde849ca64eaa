// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma play`: what is to happen to devices of a running process, from a file.
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::config::{FaultDirection, FaultsOrOff, LinkState, Object};
use crate::fabric::wire::layer::settings::{time, BadFaults};
use crate::status;

/// How often it is looked whether frames wait.
const OFTEN: Duration = Duration::from_millis(1);

/// Why a file cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not of the form that there is.
    #[error("this is no scenario")]
    Form(#[source] Box<toml::de::Error>),
    /// A step says nothing, or several things, is to happen.
    #[error("step {0} needs exactly one of faults, link, qp and cq")]
    What(usize),
    /// Neither a time nor a frame.
    #[error(
        "step {0}: '{1}' is not a time up to 1000 s, as 2s or 10ms, nor a frame, as 'frame 5000'"
    )]
    Time(usize, String),
    /// Faults make no sense.
    #[error("step {0}")]
    Faults(usize, #[source] BadFaults),
    /// A link has another state.
    #[error("step {0}: a link goes up or down, not '{1}'")]
    Link(usize, String),
    /// A direction of nothing, or another one.
    #[error("step {0}: direction is in or out, of faults or of the frames that are counted")]
    Direction(usize),
    /// A frame had gone before it could be waited for.
    #[error("step {0}: frame {1} has gone already")]
    Gone(usize, u64),
    /// The process refuses a step.
    #[error("step {0}")]
    Step(usize, #[source] status::Error),
    /// The output is closed.
    #[error("cannot say what was done")]
    Output(#[from] io::Error),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, rename = "step")]
    steps: Vec<StepConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepConfig {
    at: String,
    device: String,
    faults: Option<String>,
    direction: Option<String>,
    link: Option<String>,
    qp: Option<u32>,
    cq: Option<u32>,
}

/// What happens to a device.
#[derive(Debug, Clone, PartialEq)]
enum Deed {
    Faults(Option<FaultDirection>, FaultsOrOff),
    Link(LinkState),
    Fail(Object, u32),
}

/// When it does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    /// So long after the start.
    Time(Duration),
    /// Before this frame goes on in a direction, the first one having 0. It waits meanwhile.
    Frame(FaultDirection, u64),
}

/// A step of a scenario.
#[derive(Debug, PartialEq)]
struct Step {
    /// Its place in the file, from 1.
    number: usize,
    device: String,
    deed: Deed,
}

/// What is to happen.
#[derive(Debug, PartialEq)]
pub struct Scenario {
    /// In order of time.
    timed: Vec<(Duration, Step)>,
    /// At frames, by device and direction, each in order.
    lines: Vec<Line>,
}

/// Steps at frames of a device in a direction.
#[derive(Debug, PartialEq)]
struct Line {
    device: String,
    direction: FaultDirection,
    steps: Vec<(u64, Step)>,
}

fn step(number: usize, config: StepConfig) -> Result<(When, Step), Error> {
    let direction = match config.direction.as_deref() {
        None => None,
        Some("in") => Some(FaultDirection::In),
        Some("out") => Some(FaultDirection::Out),
        Some(_) => return Err(Error::Direction(number)),
    };
    let frame = config.at.strip_prefix("frame ");
    let frame = frame.and_then(|frame| frame.trim().parse().ok());
    let when = match (frame, time(&config.at, Duration::from_secs(1000))) {
        (Some(frame), _) => When::Frame(direction.unwrap_or(FaultDirection::Out), frame),
        (None, Some(time)) => When::Time(time),
        (None, None) => return Err(Error::Time(number, config.at)),
    };
    if direction.is_some() && config.faults.is_none() && frame.is_none() {
        return Err(Error::Direction(number));
    }
    let deed = match (config.faults, config.link, config.qp, config.cq) {
        (Some(faults), None, None, None) => {
            let faults = faults.parse();
            Deed::Faults(direction, faults.map_err(|bad| Error::Faults(number, bad))?)
        }
        (None, Some(link), None, None) => Deed::Link(match link.as_str() {
            "up" => LinkState::Up,
            "down" => LinkState::Down,
            _ => return Err(Error::Link(number, link)),
        }),
        (None, None, Some(qp), None) => Deed::Fail(Object::Qp, qp),
        (None, None, None, Some(cq)) => Deed::Fail(Object::Cq, cq),
        _ => return Err(Error::What(number)),
    };
    let step = Step {
        number,
        device: config.device,
        deed,
    };
    Ok((when, step))
}

impl Scenario {
    /// Reads one. Steps at the same time, or at the same frame, keep their order.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn read(text: &str) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| Error::Form(error.into()))?;
        let (mut timed, mut lines) = (Vec::new(), Vec::<Line>::new());
        for (number, config) in (1..).zip(file.steps) {
            let (when, step) = step(number, config)?;
            let (direction, frame) = match when {
                When::Time(at) => {
                    timed.push((at, step));
                    continue;
                }
                When::Frame(direction, frame) => (direction, frame),
            };
            let of = |line: &&mut Line| (&line.device, line.direction) == (&step.device, direction);
            match lines.iter_mut().find(of) {
                Some(line) => line.steps.push((frame, step)),
                None => lines.push(Line {
                    device: step.device.clone(),
                    direction,
                    steps: vec![(frame, step)],
                }),
            }
        }
        timed.sort_by_key(|(at, _)| *at);
        for line in &mut lines {
            line.steps.sort_by_key(|(frame, _)| *frame);
        }
        Ok(Self { timed, lines })
    }

    /// Does it all to the process behind a status socket, and says to `out` what was done when.
    ///
    /// # Errors
    /// If the process refuses a step: no other ones are done then, and no frames wait.
    pub fn play(&self, path: &Path, out: &mut impl Write) -> Result<(), Error> {
        let done = self.play_all(path, out);
        if done.is_err() {
            for line in &self.lines {
                // What went wrong is told already.
                let _ = line.go_on(path);
            }
        }
        done
    }

    fn play_all(&self, path: &Path, out: &mut impl Write) -> Result<(), Error> {
        let start = Instant::now();
        let mut timed = self.timed.iter().peekable();
        let mut lines: Vec<_> = self
            .lines
            .iter()
            .map(|line| (line, line.steps.iter().peekable()))
            .collect();
        // What begins the file is done before frames wait, and all else after that.
        let mut now = Duration::ZERO;
        while timed.peek().is_some() || !lines.is_empty() {
            while let Some((_, step)) = timed.next_if(|(at, _)| *at <= now) {
                step.play(path, start, out)?;
            }
            for (line, steps) in &mut lines {
                while let Some((frame, step)) = steps.peek() {
                    if !line.is_at(*frame, step, path)? {
                        break;
                    }
                    step.play(path, start, out)?;
                    steps.next();
                }
                if steps.peek().is_none() {
                    line.go_on(path)?;
                }
            }
            lines.retain_mut(|(_, steps)| steps.peek().is_some());
            let next = timed.peek();
            let next = next.map(|(at, _)| at.saturating_sub(start.elapsed()));
            let often = (!lines.is_empty()).then_some(OFTEN);
            if let Some(pause) = next.into_iter().chain(often).min() {
                std::thread::sleep(pause);
            }
            now = start.elapsed();
        }
        Ok(())
    }
}

impl Line {
    /// Has a frame wait. Returns whether it does, and all before it have gone on.
    fn is_at(&self, frame: u64, step: &Step, path: &Path) -> Result<bool, Error> {
        let hold = || {
            let held = status::hold_frames(path, &self.device, self.direction, Some(frame));
            held.map_err(|error| Error::Step(step.number, error))
        };
        // One that has just been counted may not yet be said to wait.
        let gone = |(frames, waits): (u64, Option<u64>)| waits.is_none() && frames > frame;
        let mut held = hold()?;
        if gone(held) {
            held = hold()?;
        }
        if gone(held) {
            return Err(Error::Gone(step.number, frame));
        }
        let (_, waits) = held;
        Ok(waits.is_some_and(|waits| waits >= frame))
    }

    /// Has no frame wait any longer.
    fn go_on(&self, path: &Path) -> Result<(), Error> {
        let Some((_, last)) = self.steps.last() else {
            return Ok(());
        };
        let held = status::hold_frames(path, &self.device, self.direction, None);
        held.map_err(|error| Error::Step(last.number, error))?;
        Ok(())
    }
}

impl Step {
    /// Does it.
    fn play(&self, path: &Path, start: Instant, out: &mut impl Write) -> Result<(), Error> {
        let (number, device) = (self.number, &self.device);
        let done = match &self.deed {
            Deed::Faults(direction, FaultsOrOff(faults)) => {
                status::set_faults(path, device, *direction, faults.as_deref())
            }
            Deed::Link(state) => status::set_link(path, device, *state == LinkState::Up),
            Deed::Fail(what, object) => status::fail(path, device, *what, *object),
        };
        done.map_err(|error| Error::Step(number, error))?;
        let now = start.elapsed().as_secs_f64();
        writeln!(out, "{now:.3} s: step {number} ({device})")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let error = Scenario::read(text).unwrap_err();
        crate::error::sentence(&error)
    }

    #[test]
    fn steps_are_in_order_of_time() {
        let text = "[[step]]\nat = '2s'\ndevice = 'b'\nlink = 'down'\n\
                    [[step]]\nat = '10ms'\ndevice = 'a'\nfaults = 'seed=1'\ndirection = 'in'\n\
                    [[step]]\nat = '2s'\ndevice = 'b'\nlink = 'up'\n\
                    [[step]]\nat = '0s'\ndevice = 'a'\nqp = 5\n\
                    [[step]]\nat = '3s'\ndevice = 'a'\nfaults = 'off'\n\
                    [[step]]\nat = '4s'\ndevice = 'a'\ncq = 7\n";
        let Scenario { timed, .. } = Scenario::read(text).unwrap();
        let steps: Vec<_> = timed.iter().map(|(_, step)| step).collect();
        let numbers: Vec<_> = steps.iter().map(|step| step.number).collect();
        assert_eq!(numbers, [4, 2, 1, 3, 5, 6]);
        let faults = FaultsOrOff(Some(Box::new("seed=1".parse().unwrap())));
        assert_eq!(
            steps[1].deed,
            Deed::Faults(Some(FaultDirection::In), faults)
        );
        assert_eq!(steps[4].deed, Deed::Faults(None, FaultsOrOff(None)));
        assert_eq!(steps[5].deed, Deed::Fail(Object::Cq, 7));
        let nothing = Scenario::read("").unwrap();
        assert!(nothing.timed.is_empty() && nothing.lines.is_empty());
    }

    #[test]
    fn steps_at_frames_are_in_order_for_each_direction() {
        let text = "[[step]]\nat = 'frame 900'\ndevice = 'a'\nlink = 'down'\n\
                    [[step]]\nat = 'frame 5'\ndevice = 'a'\ndirection = 'out'\nqp = 7\n\
                    [[step]]\nat = 'frame 5'\ndevice = 'a'\ndirection = 'in'\ncq = 7\n\
                    [[step]]\nat = '1s'\ndevice = 'a'\nlink = 'up'\n";
        let Scenario { timed, lines } = Scenario::read(text).unwrap();
        assert_eq!(timed.len(), 1);
        let of = |line: &Line| {
            let steps = line.steps.iter();
            let steps = steps.map(|(frame, step)| (*frame, step.number));
            (line.direction, steps.collect::<Vec<_>>())
        };
        let lines: Vec<_> = lines.iter().map(of).collect();
        assert_eq!(lines[0], (FaultDirection::Out, vec![(5, 2), (900, 1)]));
        assert_eq!(lines[1], (FaultDirection::In, vec![(5, 3)]));
    }

    #[test]
    fn nonsense_is_refused_in_a_sentence() {
        let first = "[[step]]\nat = '1s'\ndevice = 'a'\n";
        for (rest, why) in [
            ("", "step 1 needs exactly one of"),
            ("qp = 1\ncq = 2\n", "step 1 needs exactly one of"),
            ("link = 'sideways'\n", "a link goes up or down"),
            ("faults = 'loss=2'\n", "step 1: '2' of loss is not a part"),
            ("link = 'up'\ndirection = 'in'\n", "direction is in or out"),
            (
                "faults = 'off'\ndirection = 'x'\n",
                "direction is in or out",
            ),
            ("qp = -1\n", "this is no scenario"),
            ("color = 1\n", "this is no scenario"),
        ] {
            let said = refused(&format!("{first}{rest}"));
            assert!(said.contains(why), "{rest}: {said}");
        }
        let said = refused("[[step]]\nat = 'soon'\ndevice = 'a'\nqp = 1\n");
        assert!(said.contains("'soon' is not a time"), "{said}");
        let said = refused("[[step]]\nat = 'frame -1'\ndevice = 'a'\nqp = 1\n");
        assert!(said.contains("nor a frame"), "{said}");
    }
}
