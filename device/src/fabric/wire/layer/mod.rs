// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Layers around any port.
pub(super) mod faults;
