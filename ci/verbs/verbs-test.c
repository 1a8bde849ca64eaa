// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * verbs-test list                 names of all tests; with " (two)" those that may run between two VMs
 * verbs-test NAME...              runs these tests, or all
 * verbs-test --server PORT        runs one test with the peer that connects
 * verbs-test --peer HOST:PORT NAME  runs a test with that server
 *
 * One line for each: `NAME: ok`, `NAME: skip REASON` or `NAME: FAIL REASON`. The exit status is 1
 * if any failed.
 */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_SKIPPED = 77 };

static struct test *tests;
/* Where a test says why it failed. */
static int reasons = -1;

void register_test(struct test *test)
{
	struct test **end = &tests;

	while (*end)
		end = &(*end)->next;
	*end = test;
}

static void say(const char *prefix, const char *format, va_list arguments)
{
	char text[1024];
	int length = snprintf(text, sizeof(text), "%s", prefix);

	vsnprintf(text + length, sizeof(text) - length, format, arguments);
	if (write(reasons, text, strlen(text)) < 0)
		_exit(EXIT_FAILED);
}

void fail_at(const char *file, int line, const char *format, ...)
{
	char prefix[256];
	const char *name = strrchr(file, '/');
	va_list arguments;

	snprintf(prefix, sizeof(prefix), "%s:%d: ", name ? name + 1 : file, line);
	va_start(arguments, format);
	say(prefix, format, arguments);
	va_end(arguments);
	_exit(EXIT_FAILED);
}

void skip(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	say("", format, arguments);
	va_end(arguments);
	_exit(EXIT_SKIPPED);
}

unsigned int resource(const char *kind)
{
	char line[512], pattern[32], *at;
	unsigned int count = 0;
	FILE *out = popen("rdma resource show", "r");

	CHECK(out);
	snprintf(pattern, sizeof(pattern), " %s ", kind);
	while (fgets(line, sizeof(line), out)) {
		at = strstr(line, pattern);
		if (at)
			count += strtoul(at + strlen(pattern), NULL, 10);
	}
	CHECK(pclose(out) == 0);
	return count;
}

/* Processes of a test. */

static void run_side(const struct test *test, struct link *link, int number)
{
	ctx = open_device();
	if (test->side)
		test->side(link, number);
	else
		test->run();
}

struct link *child(void (*side)(struct link *link), pid_t *pid)
{
	struct link *link = malloc(sizeof(*link));
	int ends[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
	*pid = fork();
	CHECK(*pid >= 0);
	if (*pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		link->fd = ends[1];
		side(link);
		_exit(EXIT_OK);
	}
	close(ends[1]);
	link->fd = ends[0];
	return link;
}

void join(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid);
	if (WIFSIGNALED(status))
		fail("a process of the test ended by signal %d", WTERMSIG(status));
	if (WEXITSTATUS(status) != EXIT_OK)
		/* It has said why. */
		_exit(WEXITSTATUS(status));
}

void put(struct link *link, const void *data, size_t length)
{
	const char *at = data;

	while (length) {
		ssize_t n = send(link->fd, at, length, MSG_NOSIGNAL);

		if (n <= 0)
			fail("the other process is gone");
		at += n;
		length -= n;
	}
}

void get(struct link *link, void *data, size_t length)
{
	char *at = data;

	while (length) {
		ssize_t n = recv(link->fd, at, length, 0);

		if (n <= 0)
			fail("the other process is gone");
		at += n;
		length -= n;
	}
}

void meet(struct link *link)
{
	char here = 'x', there = 0;

	put(link, &here, 1);
	get(link, &there, 1);
	EQ(there, here);
}

void put_fd(struct link *link, int fd)
{
	char byte = 'f', control[CMSG_SPACE(sizeof(fd))] = { 0 };
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *part = CMSG_FIRSTHDR(&msg);

	part->cmsg_level = SOL_SOCKET;
	part->cmsg_type = SCM_RIGHTS;
	part->cmsg_len = CMSG_LEN(sizeof(fd));
	memcpy(CMSG_DATA(part), &fd, sizeof(fd));
	CHECK(sendmsg(link->fd, &msg, MSG_NOSIGNAL) == 1);
}

int get_fd(struct link *link)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int fd;

	CHECK(recvmsg(link->fd, &msg, 0) == 1);
	CHECK(CMSG_FIRSTHDR(&msg));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
	return fd;
}

/* The two sides of a test in one VM: this process is number 0, a child number 1. */
static const struct test *current;

static void second_side(struct link *link)
{
	run_side(current, link, 1);
}

static void first_side(const struct test *test, struct link *peer)
{
	struct link *link = peer;
	pid_t pid = 0;

	if (test->side && !peer) {
		current = test;
		link = child(second_side, &pid);
	}
	run_side(test, link, 0);
	if (pid)
		join(pid);
}

/* Counts of all kinds of objects, and who holds them. */
static void resources(char *text, size_t size)
{
	FILE *out = popen("rdma resource show 2>&1", "r");
	size_t length = out ? fread(text, 1, size - 1, out) : 0;

	text[length] = 0;
	if (out)
		pclose(out);
	while (length && text[length - 1] == '\n')
		text[--length] = 0;
}

/* Runs a test in a process of its own and says how it ended; false if it failed. */
static bool run(const struct test *test, struct link *peer, int number)
{
	char before[512], after[512], reason[2048] = "";
	size_t length = 0;
	int ends[2], status, waited = 0;
	uint64_t start = now_ns(), deadline;
	bool late = false, good = false, skipped = false;
	pid_t pid;

	resources(before, sizeof(before));
	if (pipe(ends) < 0) {
		perror("pipe");
		return false;
	}
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		setpgid(0, 0);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		reasons = ends[1];
		if (number == 1)
			run_side(test, peer, 1);
		else
			first_side(test, peer);
		_exit(EXIT_OK);
	}
	setpgid(pid, pid);
	close(ends[1]);
	deadline = start + (uint64_t)test->seconds * 1000000000;
	while ((waited = waitpid(pid, &status, WNOHANG)) == 0) {
		if (now_ns() > deadline) {
			late = true;
			kill(-pid, SIGKILL);
			waited = waitpid(pid, &status, 0);
			break;
		}
		sleep_ms(2);
	}
	/* What it left running. */
	kill(-pid, SIGKILL);
	for (;;) {
		struct pollfd poll_fd = { .fd = ends[0], .events = POLLIN };
		ssize_t n;

		if (length == sizeof(reason) - 1 || poll(&poll_fd, 1, 1000) <= 0)
			break;
		n = read(ends[0], reason + length, sizeof(reason) - 1 - length);
		if (n <= 0)
			break;
		length += n;
	}
	close(ends[0]);
	reason[length] = 0;
	if (late) {
		snprintf(reason + length, sizeof(reason) - length, "%sno end after %u s", length ? "; " : "", test->seconds);
	} else if (waited == pid && WIFSIGNALED(status)) {
		snprintf(reason + length, sizeof(reason) - length, "%sended by signal %d", length ? "; " : "",
			 WTERMSIG(status));
	} else if (waited == pid && WEXITSTATUS(status) == EXIT_SKIPPED) {
		skipped = true;
	} else if (waited == pid && WEXITSTATUS(status) == EXIT_OK) {
		good = true;
	}
	/* All that it had goes with it, in a moment. */
	for (int tries = 0; tries < 50; tries++) {
		resources(after, sizeof(after));
		if (strcmp(before, after) == 0)
			break;
		sleep_ms(100);
	}
	if (strcmp(before, after) != 0) {
		length = strlen(reason);
		snprintf(reason + length, sizeof(reason) - length, "%sobjects are left over: before: %s; after: %s",
			 length ? "; " : "", before, after);
		good = skipped = false;
	}
	printf("%s: %s%s%s (%.1f s)\n", test->name, good ? "ok" : skipped ? "skip" : "FAIL", reason[0] ? " " : "", reason,
	       (now_ns() - start) / 1e9);
	fflush(stdout);
	return good || skipped;
}

static const struct test *find(const char *name)
{
	for (const struct test *test = tests; test; test = test->next)
		if (strcmp(test->name, name) == 0)
			return test;
	fprintf(stderr, "there is no test %s\n", name);
	exit(2);
}

static int serve(const char *port_text)
{
	struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(port_text)) };
	int listener = socket(AF_INET6, SOCK_STREAM, 0), one = 1;
	struct link link;
	char name[64] = "";

	reasons = STDERR_FILENO;
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 1) < 0) {
		perror("cannot listen");
		return 2;
	}
	link.fd = accept(listener, NULL, NULL);
	if (link.fd < 0) {
		perror("accept");
		return 2;
	}
	setsockopt(link.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	get(&link, name, sizeof(name));
	name[sizeof(name) - 1] = 0;
	return !run(find(name), &link, 1);
}

static int visit(char *target, const char *name)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct link link = { .fd = socket(AF_INET, SOCK_STREAM, 0) };
	const struct test *test = find(name);
	char *colon = strrchr(target, ':'), text[64] = "";
	int one = 1;

	reasons = STDERR_FILENO;
	if (!colon || !test->side) {
		fprintf(stderr, "%s\n", colon ? "the test is for one VM" : "no port");
		return 2;
	}
	*colon = 0;
	address.sin_port = htons(atoi(colon + 1));
	if (inet_pton(AF_INET, target, &address.sin_addr) != 1 ||
	    connect(link.fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		perror("cannot connect");
		return 2;
	}
	setsockopt(link.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	snprintf(text, sizeof(text), "%s", name);
	put(&link, text, sizeof(text));
	return !run(test, &link, 0);
}

int main(int argc, char **argv)
{
	bool good = true;

	signal(SIGPIPE, SIG_IGN);
	if (argc == 3 && strcmp(argv[1], "--server") == 0)
		return serve(argv[2]);
	if (argc == 4 && strcmp(argv[1], "--peer") == 0)
		return visit(argv[2], argv[3]);
	if (argc == 2 && strcmp(argv[1], "list") == 0) {
		for (const struct test *test = tests; test; test = test->next)
			printf("%s%s\n", test->name, test->side ? " (two)" : "");
		return 0;
	}
	if (argc == 1) {
		for (const struct test *test = tests; test; test = test->next)
			good &= run(test, NULL, 0);
	}
	for (int i = 1; i < argc; i++)
		good &= run(find(argv[i]), NULL, 0);
	return !good;
}
