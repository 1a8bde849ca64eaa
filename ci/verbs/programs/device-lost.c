// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * device-lost [events] [reopen] [SECONDS]
 *
 * Keeps traffic going between queue pairs of this process, RC and UD, with receives outstanding;
 * prints "ready", and waits for the device to be lost, for SECONDS at most. Then each work request
 * has to complete once, in the order of its queue, flushed or with success; DEVICE_FATAL has to
 * come; what is posted from then on is refused or flushed; and all objects can be destroyed. With
 * `events` completion queues are polled when their event came, otherwise all the time.
 *
 * With `reopen` it then waits for the device to be there again with an active port, for RECOVERY_MS
 * at most, runs traffic once more and prints "recovered in N ms", counted from the first sign of
 * the loss.
 *
 * VERBS_DEVICE names the device, if there are several.
 */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/mman.h>

/* Work requests in each queue; messages under way; and the room for each. */
#define DEPTH 16
#define WINDOW 8
#define SLOT 2048
#define GRH 40
/* How long what must come after a loss may take, and how long the device may be away. */
#define LOSS_MS 20000
#define RECOVERY_MS 60000
/* Messages in each direction to see that the device works. */
#define PROOF 500

enum which { SEND, RECEIVE };

/* A queue pair and what is under way in its queues. */
struct side {
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_cq *cq[2];
	struct ibv_ah *ah;
	struct region memory[2];
	struct side *peer;
	/* Work requests so far, by queue. */
	uint64_t posted[2], completed[2];
	/* Completions that are no flushes. */
	uint64_t succeeded[2];
};

/*
 * RC with a completion queue for both queues; RC with one for each; UD with one for both queue
 * pairs.
 */
#define COUNT 6
#define CQS 7

static struct side sides[COUNT];
static struct ibv_cq *cqs[CQS];
static struct ibv_comp_channel *channel;
static bool by_events;
static bool fatal, flushed, async_closed, channel_closed;
static uint64_t lost_at;

__attribute__((noreturn)) void fail_at(const char *file, int line, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("failed: %s:%d: ", file, line);
	vprintf(format, args);
	printf("\n");
	va_end(args);
	exit(1);
}

__attribute__((noreturn)) void skip(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("skipped: ");
	vprintf(format, args);
	printf("\n");
	va_end(args);
	exit(77);
}

static bool lost(void)
{
	return fatal || flushed;
}

static void sign_of_loss(bool *sign)
{
	if (!lost())
		lost_at = now_ns();
	*sign = true;
}

/* The device. */

static bool find_address(struct ibv_context *context)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	struct ibv_gid_entry entry;

	for (int i = 0; i < port.gid_tbl_len; i++) {
		if (ibv_query_gid_ex(context, PORT, i, &entry, 0) == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2 &&
		    memcmp(entry.gid.raw, mapped, sizeof(mapped)) == 0) {
			gid = entry.gid;
			gid_index = i;
			return true;
		}
	}
	return false;
}

/* Opens the device if it is there, with an active port and an address. */
static bool try_open(void)
{
	const char *wanted = getenv("VERBS_DEVICE");
	struct ibv_device **list;
	int n = 0;

	list = MAKE(ibv_get_device_list(&n));
	ctx = NULL;
	for (int i = 0; i < n && !ctx; i++) {
		if (wanted && strcmp(wanted, ibv_get_device_name(list[i])) != 0)
			continue;
		ctx = ibv_open_device(list[i]);
		if (ctx && (ibv_query_port(ctx, PORT, &port) || port.state != IBV_PORT_ACTIVE || !find_address(ctx))) {
			OK(ibv_close_device(ctx));
			ctx = NULL;
		}
	}
	ibv_free_device_list(list);
	return ctx;
}

/* Queue pairs. */

static struct ibv_cq *new_cq(int number)
{
	cqs[number] = MAKE(ibv_create_cq(ctx, 8 * DEPTH, NULL, channel, 0));
	return cqs[number];
}

static void make_side(struct side *side, enum ibv_qp_type type, struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
	*side = (struct side){ .cq = { send_cq, recv_cq } };
	side->pd = MAKE(ibv_alloc_pd(ctx));
	for (int which = SEND; which <= RECEIVE; which++)
		side->memory[which] = region(side->pd, DEPTH * SLOT, LOCAL);
	struct ibv_qp_init_attr attr = {
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = type,
	};
	side->qp = MAKE(ibv_create_qp(side->pd, &attr));
}

static void set_up(void)
{
	if (by_events)
		channel = MAKE(ibv_create_comp_channel(ctx));
	for (int i = 0; i < CQS; i++)
		new_cq(i);
	for (int i = 0; i < 2; i++) {
		make_side(&sides[i], IBV_QPT_RC, cqs[i], cqs[i]);
		make_side(&sides[2 + i], IBV_QPT_RC, cqs[2 + 2 * i], cqs[3 + 2 * i]);
		make_side(&sides[4 + i], IBV_QPT_UD, cqs[6], cqs[6]);
	}
	for (int i = 0; i < COUNT; i++) {
		struct side *side = &sides[i];

		side->peer = &sides[i ^ 1];
		struct conn to = conn(side->peer->qp->qp_num);
		struct ibv_ah_attr path = path_to(gid);

		if (side->qp->qp_type == IBV_QPT_UD) {
			ready_ud(side->qp, QKEY);
			side->ah = MAKE(ibv_create_ah(side->pd, &path));
		} else {
			connect_qp(side->qp, &to);
		}
	}
	if (by_events)
		for (int i = 0; i < CQS; i++)
			OK(ibv_req_notify_cq(cqs[i], 0));
}

static void tear_down(void)
{
	for (int i = 0; i < COUNT; i++) {
		if (sides[i].ah)
			OK(ibv_destroy_ah(sides[i].ah));
		OK(ibv_destroy_qp(sides[i].qp));
		for (int which = SEND; which <= RECEIVE; which++) {
			OK(ibv_dereg_mr(sides[i].memory[which].mr));
			CHECK(munmap(sides[i].memory[which].p, DEPTH * SLOT) == 0);
		}
		OK(ibv_dealloc_pd(sides[i].pd));
	}
	for (int i = 0; i < CQS; i++)
		OK(ibv_destroy_cq(cqs[i]));
	if (channel)
		OK(ibv_destroy_comp_channel(channel));
	channel = NULL;
	OK(ibv_close_device(ctx));
}

/* Traffic. */

static uint64_t outstanding(const struct side *side, enum which which)
{
	return side->posted[which] - side->completed[which];
}

/* Queue and number of a work request. */
static uint64_t id_of(const struct side *side, enum which which)
{
	return (uint64_t)(2 * (side - sides) + which) << 48 | side->posted[which];
}

static size_t header(const struct side *side)
{
	return side->qp->qp_type == IBV_QPT_UD ? GRH : 0;
}

static uint32_t length_of(uint64_t number)
{
	return 1 + number * 37 % 1000;
}

/* Returns what the verb does. */
static int post_one(struct side *side, enum which which)
{
	uint64_t number = side->posted[which], id = id_of(side, which);
	size_t slot = number % DEPTH * SLOT;
	int error;

	if (which == RECEIVE) {
		error = post_recv(side->qp, id, &side->memory[RECEIVE], slot, SLOT);
	} else {
		fill(side->memory[SEND].p + slot, length_of(number), number);
		error = post(side->qp, &(struct op){ .opcode = IBV_WR_SEND, .id = id, .from = &side->memory[SEND],
						      .offset = slot, .length = length_of(number), .ah = side->ah,
						      .qpn = side->peer->qp->qp_num, .qkey = QKEY });
	}
	if (!error)
		side->posted[which]++;
	return error;
}

/*
 * Fills the receive queues, and the send queues as far as there are receives. After `limit`
 * messages there are no more.
 */
static void post_traffic(uint64_t limit)
{
	for (int i = 0; i < COUNT; i++)
		while (outstanding(&sides[i], RECEIVE) < DEPTH)
			OK(post_one(&sides[i], RECEIVE));
	for (int i = 0; i < COUNT; i++) {
		struct side *side = &sides[i];

		while (side->posted[SEND] < limit && outstanding(side, SEND) < WINDOW &&
		       side->posted[SEND] - side->peer->completed[RECEIVE] < WINDOW)
			OK(post_one(side, SEND));
	}
}

static void completed(const struct ibv_wc *wc)
{
	uint64_t queue = wc->wr_id >> 48, number = wc->wr_id & ((1ull << 48) - 1);
	enum which which = queue & 1;

	CHECK(queue / 2 < COUNT);
	struct side *side = &sides[queue / 2];
	size_t slot = number % DEPTH * SLOT;
	uint32_t length = length_of(number);

	if (number != side->completed[which] || number >= side->posted[which])
		fail("queue %llu: completion of work request %llu; the next one is %llu, %llu are posted",
		     (unsigned long long)queue, (unsigned long long)number, (unsigned long long)side->completed[which],
		     (unsigned long long)side->posted[which]);
	side->completed[which]++;
	EQ(wc->qp_num, side->qp->qp_num);
	if (wc->status == IBV_WC_WR_FLUSH_ERR) {
		sign_of_loss(&flushed);
		return;
	}
	if (wc->status != IBV_WC_SUCCESS)
		fail("queue %llu: work request %llu with status %d (%s)", (unsigned long long)queue,
		     (unsigned long long)number, wc->status, ibv_wc_status_str(wc->status));
	if (side->succeeded[which] != number)
		fail("queue %llu: a success after a flush", (unsigned long long)queue);
	side->succeeded[which]++;
	if (which == RECEIVE) {
		EQ(wc->byte_len, header(side) + length);
		CHECK(filled(side->memory[RECEIVE].p + slot + header(side), length, number));
	}
}

static bool poll_cq(struct ibv_cq *cq)
{
	struct ibv_wc wc[5];
	bool any = false;
	int n;

	while ((n = ibv_poll_cq(cq, 5, wc)) > 0) {
		any = true;
		for (int i = 0; i < n; i++)
			completed(&wc[i]);
	}
	EQ(n, 0);
	return any;
}

static void read_async(void)
{
	struct ibv_async_event event;

	if (ibv_get_async_event(ctx, &event)) {
		/* The device has left the file behind. */
		async_closed = true;
		return;
	}
	printf("event: %s\n", ibv_event_type_str(event.event_type));
	if (event.event_type == IBV_EVENT_DEVICE_FATAL)
		sign_of_loss(&fatal);
	ibv_ack_async_event(&event);
}

static void read_channel(void)
{
	struct ibv_cq *cq;
	void *context;

	if (ibv_get_cq_event(channel, &cq, &context)) {
		/* As above: nobody waits for events that cannot come. */
		channel_closed = true;
		for (int i = 0; i < CQS; i++)
			poll_cq(cqs[i]);
		return;
	}
	ibv_ack_cq_events(cq, 1);
	OK(ibv_req_notify_cq(cq, 0));
	poll_cq(cq);
}

/* Takes completions and events; waits for them a little if there are none. */
static void take(void)
{
	struct pollfd fds[2] = {
		{ .fd = async_closed ? -1 : ctx->async_fd, .events = POLLIN },
		{ .fd = by_events && !channel_closed ? channel->fd : -1, .events = POLLIN },
	};
	bool any = false;

	if (!by_events || channel_closed)
		for (int i = 0; i < CQS; i++)
			any |= poll_cq(cqs[i]);
	if (poll(fds, 2, by_events && !any ? 100 : 0) <= 0)
		return;
	if (fds[0].revents)
		read_async();
	if (fds[1].revents)
		read_channel();
}

static bool all_completed(void)
{
	for (int i = 0; i < COUNT; i++)
		if (outstanding(&sides[i], SEND) || outstanding(&sides[i], RECEIVE))
			return false;
	return true;
}

/* All messages up to `limit` arrive. */
static void prove(uint64_t limit)
{
	uint64_t deadline = now_ns() + LOSS_MS * 1000000ull;
	bool all = false;

	while (!all) {
		post_traffic(limit);
		take();
		if (lost())
			fail("the device was lost again");
		if (now_ns() > deadline)
			fail("the traffic has stopped");
		all = true;
		for (int i = 0; i < COUNT; i++)
			all &= sides[i].completed[SEND] == limit && sides[i].completed[RECEIVE] == limit;
	}
}

static void after_loss(void)
{
	uint64_t deadline = now_ns() + LOSS_MS * 1000000ull;

	while (!all_completed() || !fatal) {
		take();
		if (now_ns() > deadline)
			fail("%s", fatal ? "work requests are left" : "no DEVICE_FATAL");
	}
	for (int i = 0; i < COUNT; i++)
		printf("queue pair %d: %llu of %llu sent, %llu of %llu received\n", i,
		       (unsigned long long)sides[i].succeeded[SEND], (unsigned long long)sides[i].posted[SEND],
		       (unsigned long long)sides[i].succeeded[RECEIVE], (unsigned long long)sides[i].posted[RECEIVE]);
	/* More than the queues hold, over several laps. */
	for (int lap = 0; lap < 3; lap++) {
		for (int i = 0; i < COUNT; i++) {
			for (int which = SEND; which <= RECEIVE; which++) {
				int n = 0, error;

				while ((error = post_one(&sides[i], which)) == 0)
					if (++n > DEPTH)
						fail("a queue of %d takes more", DEPTH);
				if (error != ENOMEM && n > 0)
					fail("%s after %d work requests", strerror(error), n);
			}
		}
		for (int i = 0; i < CQS; i++)
			poll_cq(cqs[i]);
		CHECK(all_completed());
	}
}

int main(int argc, char **argv)
{
	unsigned int seconds = 120;
	bool reopen = false;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "events") == 0)
			by_events = true;
		else if (strcmp(argv[i], "reopen") == 0)
			reopen = true;
		else
			seconds = strtoul(argv[i], NULL, 10);
	}
	if (!try_open())
		fail("there is no device with an active port");
	set_up();
	prove(PROOF);
	printf("ready\n");
	uint64_t deadline = now_ns() + seconds * 1000000000ull;
	while (!lost()) {
		post_traffic(UINT64_MAX);
		take();
		if (now_ns() > deadline)
			fail("the device is not lost");
	}
	after_loss();
	tear_down();
	printf("flushed\n");
	if (!reopen)
		return 0;
	deadline = lost_at + RECOVERY_MS * 1000000ull;
	while (!try_open()) {
		if (now_ns() > deadline)
			fail("the device does not come back");
		sleep_ms(20);
	}
	fatal = flushed = async_closed = channel_closed = false;
	set_up();
	prove(PROOF);
	printf("recovered in %llu ms\n", (unsigned long long)(now_ns() - lost_at) / 1000000);
	return 0;
}
