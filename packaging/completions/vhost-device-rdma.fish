# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_vhost_device_rdma_global_optspecs
    string join \n socket-path= vfio-user-path= config= workers= poll-us= drain= status-socket= metrics= log-format= socket-mode= socket-owner= socket-group= user= sandbox= h/help V/version
end

function __fish_vhost_device_rdma_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_vhost_device_rdma_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_vhost_device_rdma_using_subcommand
    set -l cmd (__fish_vhost_device_rdma_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l socket-path -d 'Serve a VM on this socket; may be repeated.' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l vfio-user-path -d 'Serve a VM on this socket by vfio-user, for a stock QEMU from 10.1 on; may be repeated. The options are those of --socket-path.' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l config -d 'Read settings and devices from this TOML file; the command line has priority' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l workers -d 'Worker threads that move data, 1 to 8 [default: half of the CPUs, at most 4]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l poll-us -d 'How long an idle worker polls before it sleeps, microseconds [default: 50]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l drain -d 'Let work requests that are posted complete when the process is told to end, for so long at most; 0: end at once [default: 2]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l status-socket -d 'Give the status as JSON to everyone who may connect to this socket, and have them take links down and up, lose frames, and put queues in error' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l metrics -d 'Tell metrics at this socket, or at this port of the loopback interface, by HTTP at /metrics' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l log-format -d 'The form of the log: text, or JSON with one object in each line [default: text]' -r -f -a "text\t'For people'
json\t'A JSON object with `time` (RFC 3339, UTC), `level`, `target` (the module) and `message`, and `device`, its name, if the line is about one or its VM'"
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l socket-mode -d 'Permissions of all sockets, octal, such as 0660 [default: what the umask leaves]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l socket-owner -d 'Owner of all sockets, a name or a number [default: the user of the process]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l socket-group -d 'Group of all sockets, a name or a number [default: the group of the process]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l user -d 'Become this user when the sockets are there, a name or a number [default: if started as root, vhost-device-rdma if there is such a user, else 65534]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -l sandbox -d 'Give up what is not needed: privileges, files, system calls. log: system calls that should not be needed are logged by the kernel, and carried out [default: on]' -r -f -a "on\t'A system call that is not listed ends the process'
log\t'A system call that is not listed is logged by the kernel, and carried out'
off\t'There is none, for debuggers and profilers'"
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -s V -l version -d 'Print version'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "status" -d 'Print the objects, counters and state of all VMs of a running process, as JSON'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "wire-setup" -d 'Prepare an interface of the host, so that a process that starts without privileges can have it as the `netdev` of a device'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "link" -d 'Take the link of a device of a running process down, or up again'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "faults" -d 'Have frames of a device of a running process lost, damaged, repeated, reordered or delayed, to test how software takes it'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "fail" -d 'Put a queue pair or a completion queue of a VM in error, to test how software takes it'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "list" -d 'Print the devices of a running process, with a VM or without'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "limits" -d 'Print the limits of the devices of a running process, or change those of one'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "counters" -d 'Print what was counted of the VMs of a running process since each was attached'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "top" -d 'Show what VMs, workers and queue pairs of a running process do, until it is stopped'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "check" -d 'Look at this host, and say what it lacks for VMs with the device, and what to do'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "add" -d 'Have a running process serve one more device'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "remove" -d 'Have a running process serve a device no longer: its VM loses it, and its socket is removed, unless a service manager has bound that'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "reload" -d 'Have a running process serve the devices of a configuration file, and no others'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "play" -d 'Do what a file says to devices of a running process, step by step: faults, links, queues in error'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "capture" -d 'Write what a running process sends and receives over the wire, and what VMs of it send each other, to standard output, for Wireshark, until it is stopped'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand status" -l pretty -d 'Print it for people: indented'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand status" -s h -l help -d 'Print help'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand wire-setup" -l user -d 'The user of the process, a name or a number' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand wire-setup" -l pins -d 'Where programs are pinned: a file system of type bpf' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand wire-setup" -l remove -d 'Take back what was prepared'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand wire-setup" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand link" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand faults" -l direction -d 'Only what the VM sends, or only what comes for it' -r -f -a "out\t'What the VM sends'
in\t'What comes for it'"
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand faults" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand fail" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand list" -l json -d 'Print them as JSON'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand list" -s h -l help -d 'Print help'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand limits" -l weight -d 'VMs that all have work share a worker in proportion to it, 1 to 10000' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand limits" -l bytes-per-second -d 'Bytes that the VM may send, or read from others, per second; 0: no limit' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand limits" -l messages-per-second -d 'Messages that the VM may send per second; 0: no limit' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand limits" -l json -d 'Print them as JSON'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand limits" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand counters" -l json -d 'Print it as JSON'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand counters" -s h -l help -d 'Print help'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand top" -l interval -d 'Seconds from one look to the next' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand top" -l times -d 'Look so many times [default: until it is stopped]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand top" -l queue-pairs -d 'Show so many queue pairs at most, the busiest' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand top" -s h -l help -d 'Print help'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand check" -l status-socket -d 'Look at the process, too, that was given this as --status-socket' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand check" -l lspci -d 'Look at what `lspci -nnk` said in a guest, too' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand check" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand add" -l socket-mode -d 'Permissions of the socket, octal, such as 0660 [default: what the umask leaves]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand add" -l socket-owner -d 'Owner of the socket, a name or a number [default: you]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand add" -l socket-group -d 'Group of the socket, a name or a number [default: yours]' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand add" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand remove" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand reload" -l config -d 'The file' -r -F
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand reload" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand play" -s h -l help -d 'Print help'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand capture" -l vm -d 'Only frames from and to the VM of this device: its socket as `status` names it, or its MAC address' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand capture" -l snap -d 'At most so many bytes of each frame' -r
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand capture" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "status" -d 'Print the objects, counters and state of all VMs of a running process, as JSON'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "wire-setup" -d 'Prepare an interface of the host, so that a process that starts without privileges can have it as the `netdev` of a device'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "link" -d 'Take the link of a device of a running process down, or up again'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "faults" -d 'Have frames of a device of a running process lost, damaged, repeated, reordered or delayed, to test how software takes it'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "fail" -d 'Put a queue pair or a completion queue of a VM in error, to test how software takes it'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "list" -d 'Print the devices of a running process, with a VM or without'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "limits" -d 'Print the limits of the devices of a running process, or change those of one'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "counters" -d 'Print what was counted of the VMs of a running process since each was attached'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "top" -d 'Show what VMs, workers and queue pairs of a running process do, until it is stopped'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "check" -d 'Look at this host, and say what it lacks for VMs with the device, and what to do'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "add" -d 'Have a running process serve one more device'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "remove" -d 'Have a running process serve a device no longer: its VM loses it, and its socket is removed, unless a service manager has bound that'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "reload" -d 'Have a running process serve the devices of a configuration file, and no others'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "play" -d 'Do what a file says to devices of a running process, step by step: faults, links, queues in error'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "capture" -d 'Write what a running process sends and receives over the wire, and what VMs of it send each other, to standard output, for Wireshark, until it is stopped'
complete -c vhost-device-rdma -n "__fish_vhost_device_rdma_using_subcommand help; and not __fish_seen_subcommand_from status wire-setup link faults fail list limits counters top check add remove reload play capture help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
