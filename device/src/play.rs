// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma play`: what is to happen to devices of a running process, from a file.
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::config::{FaultDirection, FaultsOrOff, LinkState, Object};
use crate::fabric::wire::layer::settings::{time, BadFaults};
use crate::status;

/// Why a file cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not of the form that there is.
    #[error("this is no scenario")]
    Form(#[source] Box<toml::de::Error>),
    /// A step says nothing, or several things, is to happen.
    #[error("step {0} needs exactly one of faults, link, qp and cq")]
    What(usize),
    /// A time is none.
    #[error("step {0}: '{1}' is not a time up to 1000 s, as 2s or 10ms")]
    Time(usize, String),
    /// Faults make no sense.
    #[error("step {0}")]
    Faults(usize, #[source] BadFaults),
    /// A link has another state.
    #[error("step {0}: a link goes up or down, not '{1}'")]
    Link(usize, String),
    /// A direction without faults, or another one.
    #[error("step {0}: direction is in or out, of faults")]
    Direction(usize),
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

/// A step of a scenario.
#[derive(Debug, PartialEq)]
struct Step {
    /// Its place in the file, from 1.
    number: usize,
    at: Duration,
    device: String,
    deed: Deed,
}

/// What is to happen, in order of time.
#[derive(Debug, PartialEq)]
pub struct Scenario(Vec<Step>);

fn step(number: usize, config: StepConfig) -> Result<Step, Error> {
    let at = time(&config.at, Duration::from_secs(1000));
    let at = at.ok_or(Error::Time(number, config.at))?;
    let direction = match config.direction.as_deref() {
        None => None,
        Some("in") => Some(FaultDirection::In),
        Some("out") => Some(FaultDirection::Out),
        Some(_) => return Err(Error::Direction(number)),
    };
    if direction.is_some() && config.faults.is_none() {
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
    Ok(Step {
        number,
        at,
        device: config.device,
        deed,
    })
}

impl Scenario {
    /// Reads one. Steps at the same time keep their order.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn read(text: &str) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| Error::Form(error.into()))?;
        let steps = (1..).zip(file.steps);
        let steps = steps.map(|(number, config)| step(number, config));
        let mut steps: Vec<_> = steps.collect::<Result<_, _>>()?;
        steps.sort_by_key(|step| step.at);
        Ok(Self(steps))
    }

    /// Does it all to the process behind a status socket, and says to `out` what was done when.
    ///
    /// # Errors
    /// If the process refuses a step: those behind it are not done.
    pub fn play(&self, path: &Path, out: &mut impl Write) -> Result<(), Error> {
        let start = Instant::now();
        for Step {
            number,
            at,
            device,
            deed,
        } in &self.0
        {
            std::thread::sleep(at.saturating_sub(start.elapsed()));
            let done = match deed {
                Deed::Faults(direction, FaultsOrOff(faults)) => {
                    status::set_faults(path, device, *direction, faults.as_deref())
                }
                Deed::Link(state) => status::set_link(path, device, *state == LinkState::Up),
                Deed::Fail(what, object) => status::fail(path, device, *what, *object),
            };
            done.map_err(|error| Error::Step(*number, error))?;
            let now = start.elapsed().as_secs_f64();
            writeln!(out, "{now:.3} s: step {number} ({device})")?;
        }
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
        let Scenario(steps) = Scenario::read(text).unwrap();
        let numbers: Vec<_> = steps.iter().map(|step| step.number).collect();
        assert_eq!(numbers, [4, 2, 1, 3, 5, 6]);
        let faults = FaultsOrOff(Some(Box::new("seed=1".parse().unwrap())));
        assert_eq!(
            steps[1].deed,
            Deed::Faults(Some(FaultDirection::In), faults)
        );
        assert_eq!(steps[4].deed, Deed::Faults(None, FaultsOrOff(None)));
        assert_eq!(steps[5].deed, Deed::Fail(Object::Cq, 7));
        assert_eq!(Scenario::read("").unwrap(), Scenario(Vec::new()));
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
    }
}
